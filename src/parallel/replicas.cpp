#include "parallel/replicas.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <unordered_map>
#include <unordered_set>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

using Tensors = Replicas::Tensors;

// Guard: the global CPU generator continues afterwards as if nothing had been drawn. clone() runs
// reset(), which initialises weights that are thrown away at once.
class KeepRandomState {
 public:
  KeepRandomState() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepRandomState() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  at::Generator generator_;
  torch::Tensor state_;
};

// Makes `copy` hold what `original` holds, also after the user changed its dtype or shape.
void refresh_tensor(torch::Tensor& copy, const torch::Tensor& original, const Device& device) {
  if (copy.sizes() == original.sizes() && copy.dtype() == original.dtype()) {
    copy.copy_(original, /*non_blocking=*/true);
  } else {
    copy.set_data(original.detach().to(device.torch_device()).clone());
  }
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Whether a gradient may be added to in place: nobody else can see its memory.
bool is_ours_alone(const torch::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense();
}

// One parameter's gradients: the sum so far, on device 0, and what the other replicas add to it in
// order.
struct Sum {
  torch::Tensor total;
  Tensors others;
};

// Adds share `share` of `shares` of every sum. Shares touch disjoint memory, and each element is
// added in replica order, so the result does not depend on how many workers take part.
void add_share(std::vector<Sum>& sums, int64_t share, int64_t shares) {
  const torch::NoGradGuard no_grad;
  for (auto& sum : sums) {
    for (const auto& other : sum.others) {
      if (sum.total.is_contiguous() && other.is_contiguous()) {
        const int64_t count = sum.total.numel();
        const int64_t begin = count * share / shares;
        const int64_t length = count * (share + 1) / shares - begin;
        sum.total.view(-1).narrow(0, begin, length).add_(other.view(-1).narrow(0, begin, length));
      } else if (share == 0) {
        sum.total.add_(other);
      }
    }
  }
}

}  // namespace

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const Devices& devices,
                   const ReplicaGroup::MakeReplica& make_replica)
    : devices_(devices) {
  replicas_.push_back(describe(std::move(module)));
  require_home();
  std::unordered_map<const c10::TensorImpl*, size_t> first_name;
  for (size_t i = 0; i < replicas_[0].parameters.size(); ++i) {
    owners_.push_back(
        first_name.emplace(replicas_[0].parameters[i].unsafeGetTensorImpl(), i).first->second);
  }
  for (size_t index = 1; index < devices.size(); ++index) {
    replicas_.push_back(
        devices[index].run("replicate", [&] { return describe(make(index, make_replica)); }));
    require_same_tensors(replicas_.back());
  }
}

Replicas::Replica Replicas::describe(std::shared_ptr<torch::nn::Module> module) {
  Tensors parameters = module->parameters();
  Tensors buffers = module->buffers();
  return {std::move(module), std::move(parameters), std::move(buffers)};
}

std::shared_ptr<torch::nn::Module> Replicas::make(
    size_t index, const ReplicaGroup::MakeReplica& make_replica) const {
  const KeepRandomState random;
  const torch::Device target = devices_[index].torch_device();
  const auto& original = replicas_[0].module;
  if (make_replica) {
    auto replica = make_replica();
    if (!replica || replica == original) {
      throw Error(
          Code::kReplicate, "make_replica returned no module of its own",
          "return a freshly made module each time, e.g. [] { return std::make_shared<Net>(); }");
    }
    replica->to(target);
    return replica;
  }
  std::shared_ptr<torch::nn::Module> replica;
  try {
    replica = original->clone(target);
  } catch (const c10::Error& error) {
    throw Error(Code::kReplicate,
                fmt::format("module {} cannot be replicated on {}", original->name(),
                            devices_[index].name()),
                "derive it from torch::nn::Cloneable<Net> and build its parts in reset(), or pass "
                "DataParallel a "
                "third argument that makes a fresh one: [] { return std::make_shared<Net>(); }",
                {lockstep::describe(error)});
  }
  return replica;
}

void Replicas::require_home() const {
  const Device& home = devices_[0];
  const auto check = [&](const auto& named, const char* kind) {
    for (const auto& item : named) {
      if (home.holds(item.value())) continue;
      throw Error(
          Code::kPlacement,
          fmt::format("{} \"{}\" is not on {}, the first device", kind, item.key(), home.name()),
          "make the module under UseDevice(devices[0]), or move it there first: "
          "module->to(devices[0].torch_device())",
          {fmt::format("it is on {}", item.value().device().str())});
    }
  };
  check(replicas_[0].module->named_parameters(), "parameter");
  check(replicas_[0].module->named_buffers(), "buffer");
}

void Replicas::require_same_tensors(const Replica& replica) const {
  const auto names = [](const auto& named) { return named.keys(); };
  const auto& original = replicas_[0].module;
  if (names(original->named_parameters()) == names(replica.module->named_parameters()) &&
      names(original->named_buffers()) == names(replica.module->named_buffers())) {
    return;
  }
  throw Error(Code::kReplicate,
              fmt::format("a replica of {} has other parameters or buffers than the module",
                          original->name()),
              "make replicas with the same constructor arguments as the module",
              {fmt::format("module: {} parameters and {} buffers; replica: {} and {}",
                           replicas_[0].parameters.size(), replicas_[0].buffers.size(),
                           replica.parameters.size(), replica.buffers.size())});
}

void Replicas::require_unchanged() const {
  const auto& original = replicas_[0];
  const Tensors parameters = original.module->parameters();
  const auto same = [](const torch::Tensor& a, const torch::Tensor& b) { return a.is_same(b); };
  if (std::equal(parameters.begin(), parameters.end(), original.parameters.begin(),
                 original.parameters.end(), same) &&
      original.module->buffers().size() == original.buffers.size()) {
    return;
  }
  throw Error(Code::kReplicate,
              "the module got other parameters or buffers after DataParallel was made",
              "make a new DataParallel after changing the module");
}

void Replicas::refresh(size_t index) {
  if (index == 0) return;
  const torch::NoGradGuard no_grad;
  const Replica& original = replicas_[0];
  Replica& replica = replicas_[index];
  Device& device = devices_[index];
  const Tensors buffers = original.module->buffers();  // BatchNorm may replace a buffer
  for (size_t i = 0; i < original.parameters.size(); ++i) {
    refresh_tensor(replica.parameters[i], original.parameters[i], device);
    replica.parameters[i].set_requires_grad(original.parameters[i].requires_grad());
  }
  for (size_t i = 0; i < buffers.size(); ++i)
    refresh_tensor(replica.buffers[i], buffers[i], device);
  devices_[0].count_traffic_to(device, bytes_of(original.parameters) + bytes_of(buffers));

  const auto from = original.module->modules();
  const auto to = replica.module->modules();
  for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
    if (to[i]->is_training() != from[i]->is_training()) to[i]->train(from[i]->is_training());
  }
}

Tensors Replicas::trainable() const {
  Tensors chosen;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] == i && replicas_[0].parameters[i].requires_grad())
      chosen.push_back(replicas_[0].parameters[i]);
  }
  return chosen;
}

Tensors Replicas::sum_gradients(std::vector<Tensors> gradients) const {
  const size_t used = gradients.size();
  std::vector<Tensors> parts(owners_.size());  // [named parameter]; filled at owners only
  for (size_t replica = 0; replica < used; ++replica) {
    const int64_t bytes = collect_parts(replica, gradients[replica], parts);
    if (replica > 0) devices_[replica].count_traffic_to(devices_[0], bytes);
  }
  gradients.clear();

  std::vector<Sum> sums;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] != i || !replicas_[0].parameters[i].requires_grad()) continue;
    Sum sum;
    if (!parts[i].empty()) {
      sum.total = parts[i].front().to(devices_[0].torch_device());
      parts[i].front().reset();
      if (parts[i].size() > 1 && !is_ours_alone(sum.total)) sum.total = sum.total.clone();
      for (size_t k = 1; k < parts[i].size(); ++k)
        sum.others.push_back(parts[i][k].to(devices_[0].torch_device()));
      parts[i].clear();
    }
    sums.push_back(std::move(sum));
  }

  if (devices_.is_cuda()) {
    add_share(sums, 0, 1);
  } else {
    std::vector<std::future<void>> shares;
    for (size_t share = 0; share < used; ++share) {
      shares.push_back(devices_[share].submit("sum gradients", [&, share] {
        add_share(sums, static_cast<int64_t>(share), static_cast<int64_t>(used));
      }));
    }
    for (auto& share : shares) share.wait();
    for (auto& share : shares) share.get();
  }

  Tensors totals;
  for (auto& sum : sums) totals.push_back(std::move(sum.total));
  return totals;
}

// Sorts one replica's gradients by the parameter they belong to. A replica may have untied what the
// module ties, and then one parameter takes several; or tie it too, and then each tensor counts
// once.
int64_t Replicas::collect_parts(size_t replica, Tensors& gradients,
                                std::vector<Tensors>& parts) const {
  std::unordered_set<const c10::TensorImpl*> seen;
  int64_t bytes = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() ||
        !seen.insert(replicas_[replica].parameters[i].unsafeGetTensorImpl()).second)
      continue;
    bytes += static_cast<int64_t>(gradients[i].nbytes());
    parts[owners_[i]].push_back(std::move(gradients[i]));
  }
  return bytes;
}

}  // namespace lockstep
