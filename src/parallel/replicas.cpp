#include "parallel/replicas.hpp"

#include <algorithm>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "device/streams.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

bool is_flat(const torch::Tensor& tensor) {
  return !tensor.is_sparse() && tensor.is_contiguous();
}

// Whether nobody else can see the gradient's memory, so that it may be added to in place.
bool is_ours_alone(const torch::Tensor& tensor) {
  return !tensor.is_sparse() && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense();
}

torch::Tensor bring_home(const torch::Tensor& gradient, const Device& home) {
  keep_for_current_stream(gradient);
  return gradient.to(home.torch_device(), /*non_blocking=*/true);
}

/// The sum of one parameter's gradients on device 0.
class GradientSum {
 public:
  /// `parts` are the replicas' gradients in device order; without any the sum stays undefined.
  GradientSum(std::vector<torch::Tensor> parts, const Device& home);

  /// Adds one of `shares` equal shares. Shares touch disjoint memory, and each element is added in
  /// replica order, so the result does not depend on the number of workers. Share 0 adds all of a
  /// gradient that cannot be divided.
  void add_share(int64_t share, int64_t shares);

  torch::Tensor take() { return std::move(total_); }

 private:
  torch::Tensor total_;
  std::vector<torch::Tensor> others_;  // to be added, in order
  bool divisible_ = false;
};

GradientSum::GradientSum(std::vector<torch::Tensor> parts, const Device& home) {
  if (parts.empty()) return;
  const bool is_cpu = home.torch_device().is_cpu();
  total_ = bring_home(parts.front(), home);
  parts.front().reset();
  const bool elsewhere = is_cpu && account_of(total_) != nullptr && !home.owns(total_);
  if (elsewhere || (parts.size() > 1 && !total_.is_sparse() && !is_ours_alone(total_))) {
    total_ = total_.clone();
  }
  for (size_t i = 1; i < parts.size(); ++i) others_.push_back(bring_home(parts[i], home));
  divisible_ = is_flat(total_) && std::all_of(others_.begin(), others_.end(), is_flat);
}

void GradientSum::add_share(int64_t share, int64_t shares) {
  for (const auto& other : others_) {
    if (divisible_) {
      const int64_t count = total_.numel();
      const int64_t begin = count * share / shares;
      const int64_t length = count * (share + 1) / shares - begin;
      total_.view(-1).narrow(0, begin, length).add_(other.view(-1).narrow(0, begin, length));
    } else if (share == 0) {
      total_ = total_.is_sparse() ? other + total_ : total_.add_(other);
    }
  }
}

// Computes all sums; CPU devices share the work among the workers of the first `workers` devices.
void add_up(std::vector<GradientSum>& sums, const Devices& devices, size_t workers) {
  const auto add = [&](int64_t share, int64_t shares) {
    const torch::NoGradGuard no_grad;
    for (auto& sum : sums) sum.add_share(share, shares);
  };
  if (devices.is_cuda()) {
    add(0, 1);
    return;
  }
  ReplicaTasks<void> tasks;
  for (size_t share = 0; share < workers; ++share) {
    tasks.add(devices[share].submit("sum gradients", [&, share] {
      add(static_cast<int64_t>(share), static_cast<int64_t>(workers));
    }));
  }
  tasks.wait(devices, "sum of gradients");
}

// The bytes it takes to send a gradient.
int64_t gradient_bytes(const torch::Tensor& gradient) {
  if (!gradient.is_sparse()) return static_cast<int64_t>(gradient.nbytes());
  return static_cast<int64_t>(gradient._indices().nbytes() + gradient._values().nbytes());
}

// Copies `original` to `copy`, even after the user changed its dtype or shape.
void refresh_tensor(torch::Tensor& copy, const torch::Tensor& original, const Device& device) {
  if (copy.sizes() == original.sizes() && copy.dtype() == original.dtype()) {
    // Through an alias with a version counter of its own: the graph of an earlier forward may have
    // saved `copy`. Replica 0's own check still refuses weights that really changed in between.
    copy.variable_data().copy_(original, /*non_blocking=*/true);
  } else {
    copy.set_data(original.detach().to(device.torch_device()).clone());
  }
}

int64_t bytes_of(const std::vector<torch::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const Devices& devices,
                   const ReplicaGroup::MakeReplica& make_replica)
    : devices_(devices) {
  require_not_sharded(*module, "DataParallel",
                      "divide a model over ranks, one for each device, and leave DataParallel out");
  if (auto* recorder = StepRecorder::of_process()) recorder->learn(*module, "data_parallel");
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

// Runs on the replica's worker, so that its memory is charged there and its constructor does not
// draw from the user's random numbers.
std::shared_ptr<torch::nn::Module> Replicas::make(
    size_t index, const ReplicaGroup::MakeReplica& make_replica) const {
  const c10::InferenceMode trainable_tensors(false);
  const auto& original = replicas_[0].module;
  const torch::Device target = devices_[index].torch_device();
  auto replica = make_replica ? make_replica() : clone_to(target);
  if (!replica || replica == original) {
    throw Error(
        Code::kReplicate, "make_replica returned no module of its own",
        "return a freshly made module each time, e.g. [] { return std::make_shared<Net>(); }");
  }
  const auto& made = *replica;
  const auto& wanted = *original;
  if (typeid(made) != typeid(wanted)) {
    throw Error(Code::kReplicate,
                fmt::format("the replica of {} is a {}", original->name(), replica->name()),
                "derive the class itself from torch::nn::Cloneable, or make the same type in "
                "make_replica");
  }
  replica->to(target);
  return replica;
}

std::shared_ptr<torch::nn::Module> Replicas::clone_to(torch::Device device) const {
  const auto& original = replicas_[0].module;
  try {
    return original->clone(device);
  } catch (const c10::Error& error) {
    throw Error(Code::kReplicate, fmt::format("module {} cannot be replicated", original->name()),
                "derive it from torch::nn::Cloneable<Net> and build its parts in reset(), or pass "
                "DataParallel a third argument that makes a fresh one: "
                "[] { return std::make_shared<Net>(); }",
                {lockstep::describe(error)});
  }
}

// A CPU tensor is at home on device 0 unless it was charged to another device of this group.
void Replicas::require_home() const {
  const Device& home = devices_[0];
  const auto check = [&](const auto& named, const char* kind) {
    for (const auto& item : named) {
      const torch::Tensor& tensor = item.value();
      std::string elsewhere;
      if (tensor.device() != home.torch_device()) elsewhere = tensor.device().str();
      for (size_t i = 1; i < devices_.size(); ++i) {
        if (devices_[i].owns(tensor)) elsewhere = devices_[i].name();
      }
      if (elsewhere.empty()) continue;
      throw Error(Code::kPlacement,
                  fmt::format("{} \"{}\" is on {}, not on {}, the first device", kind, item.key(),
                              elsewhere, home.name()),
                  tensor.is_cpu() && home.torch_device().is_cpu()
                      ? "make the module under UseDevice(devices[0])"
                      : "move it there first: module->to(devices[0].torch_device())");
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
              {fmt::format("module: {} and {}; replica: {} and {}",
                           counted(replicas_[0].parameters.size(), "parameter"),
                           counted(replicas_[0].buffers.size(), "buffer"),
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
  if (is_planted(Mutation::kReplicaStale)) return;     // it was made with the first weights
  const Tensors buffers = original.module->buffers();  // BatchNorm may replace a buffer
  for (size_t i = 0; i < original.parameters.size(); ++i) {
    refresh_tensor(replica.parameters[i], original.parameters[i], device);
    replica.parameters[i].set_requires_grad(original.parameters[i].requires_grad());
  }
  Tensors copies = replica.module->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) refresh_tensor(copies[i], buffers[i], device);
  devices_[0].count_traffic_to(device, bytes_of(original.parameters) + bytes_of(buffers));

  const auto from = original.module->modules();
  const auto to = replica.module->modules();
  for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
    if (to[i]->is_training() != from[i]->is_training()) to[i]->train(from[i]->is_training());
  }
}

std::vector<size_t> Replicas::trainable() const {
  std::vector<size_t> positions;
  for (size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] == i && replicas_[0].parameters[i].requires_grad()) positions.push_back(i);
  }
  return positions;
}

Replicas::Tensors Replicas::sum_gradients(std::vector<Tensors> gradients,
                                          const std::vector<size_t>& positions) const {
  if (is_planted(Mutation::kReplicaForgotten) && gradients.size() > 1) gradients.pop_back();
  const size_t used = gradients.size();
  std::vector<Tensors> parts(owners_.size());  // [named parameter]; filled at owners only
  for (size_t replica = 0; replica < used; ++replica) {
    const int64_t bytes = collect_parts(replica, gradients[replica], parts);
    if (replica > 0) devices_[replica].count_traffic_to(devices_[0], bytes);
  }
  gradients.clear();

  std::vector<GradientSum> sums;
  sums.reserve(positions.size());
  for (const size_t each : positions) sums.emplace_back(std::move(parts[each]), devices_[0]);
  add_up(sums, devices_, used);

  Tensors totals;
  for (auto& sum : sums) totals.push_back(sum.take());
  return totals;
}

// Sorts one replica's gradients by the parameter they belong to and returns their bytes. A replica
// may have untied what the module ties, so that one parameter takes several gradients; if it ties
// them too, each tensor counts once.
int64_t Replicas::collect_parts(size_t replica, Tensors& gradients,
                                std::vector<Tensors>& parts) const {
  std::unordered_set<const c10::TensorImpl*> seen;
  int64_t bytes = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto* parameter = replicas_[replica].parameters[i].unsafeGetTensorImpl();
    if (!gradients[i].defined() || !seen.insert(parameter).second) continue;
    bytes += gradient_bytes(gradients[i]);
    parts[owners_[i]].push_back(std::move(gradients[i]));
  }
  return bytes;
}

}  // namespace lockstep
