#include "gradients/virtual_shards.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/torch.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <optional>
#include <utility>

#include "base/counted.hpp"
#include "base/process.hpp"
#include "device/capture.hpp"
#include "gradients/sparse_gradients.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"

namespace lockstep {
namespace {

torch::Device device_of_module(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    if (parameter.defined()) return parameter.device();
  }
  return torch::kCPU;
}

// A number of 64 bits as two that a double holds exactly.
constexpr int kHalfBits = 32;

double half_of(uint64_t seed, int half) {
  return static_cast<double>((seed >> (kHalfBits * half)) & 0xffffffffU);
}

void backward_of_part(const torch::Tensor& loss, const PartStep& how) {
  const Autocast off(loss.device(), torch::kBFloat16, /*enabled=*/false);
  (how.scaler != nullptr ? how.scaler->scale(loss) : loss).backward();
}

}  // namespace

torch::Tensor BatchPart::rows_of(const torch::Tensor& rank_rows) const {
  const int64_t rows = rank_rows.dim() > 0 ? rank_rows.size(0) : 0;
  if (rows == 0 || rows % local_count != 0) {
    throw Error(
        Code::kSplit,
        fmt::format("{} of this rank cannot be divided evenly into its {} of {}",
                    counted(rows, "row"), counted(local_count, "part"), count),
        fmt::format("make the global batch a multiple of {}; or let the function that "
                    "backward_parts() is given take the rows of part.index itself, and give "
                    "set_weight() their number",
                    counted(count, "row")));
  }
  const int64_t own = rows / local_count;
  return rank_rows.narrow(0, local_index * own, own).clone();
}

void PartSeeds::begin_step(bool continues) {
  micro_step_ = continues ? micro_step_ + 1 : 0;
  if (!continues) ++steps_;
}

uint64_t PartSeeds::seed_of(int64_t part) const {
  const uint64_t program_seed = generators_of_thread({}).at("cpu").current_seed();
  const std::array<uint64_t, 4> parts = {
      program_seed, static_cast<uint64_t>(resumed_steps() + steps_),
      static_cast<uint64_t>(micro_step_), static_cast<uint64_t>(part)};
  return XXH3_64bits(parts.data(), sizeof(parts));
}

FixedThreads::FixedThreads(int threads) : before_(at::get_num_threads()) {
  if (threads != before_) at::set_num_threads(threads);
}

FixedThreads::~FixedThreads() {
  if (at::get_num_threads() != before_) at::set_num_threads(before_);
}

PartBuffers::PartBuffers(const torch::nn::Module& module) : buffers_(module.buffers()) {
  at_begin_ = copies();
}

std::vector<torch::Tensor> PartBuffers::copies() const {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> values;
  for (const auto& buffer : buffers_) values.push_back(buffer.detach().clone());
  return values;
}

// The alias has a version counter of its own: a graph may have saved the buffer, but a training
// backward does not read it.
void PartBuffers::put(const std::vector<torch::Tensor>& values) const {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) buffers_[i].variable_data().copy_(values[i]);
}

void PartBuffers::end_forward(int64_t local_index) {
  if (local_index == 0) after_first_ = copies();
}

VirtualShards::VirtualShards(int64_t parts, int threads, const Communicator& comm,
                             std::string wrapper)
    : tree_(parts, comm.size()), comm_(comm), threads_(threads), wrapper_(std::move(wrapper)) {
  require_part_threads(threads);
}

void require_part_threads(int threads) {
  if (threads >= 1) return;
  throw Error(Code::kUsage,
              fmt::format("a part cannot be computed by {}", counted(threads, "thread")),
              "set part_threads to 1, or to what every run shall use");
}

void require_same_in_parts(const torch::nn::Module& module, bool shares_buffers,
                           const std::string& wrapper) {
  const auto refuse = [&](const std::string& what, const std::string& help) {
    throw Error(Code::kUsage, fmt::format("{} with virtual_shards: {}", wrapper, what), help);
  };
  const auto sparse = by_gradient(module, trained_in(module)).sparse;
  if (!sparse.empty()) {
    refuse(fmt::format("the gradient of {} is sparse", sparse.front().name),
           "construct the embedding without sparse gradients");
  }
  for (const auto& layer : module.named_modules()) {
    if (layer.value()->name() != "SyncBatchNorm") continue;
    refuse(fmt::format("{} computes over the rows of all ranks", layer.key()),
           "use a plain BatchNorm, whose statistics are those of a part");
  }
  if (shares_buffers || module.buffers().empty()) return;
  refuse("broadcast_buffers is off, and each rank would have buffers of its own",
         "leave broadcast_buffers on");
}

BatchPart VirtualShards::part(int64_t local_index) const {
  return {tree_.parts_of(comm_.rank()).begin + local_index, tree_.parts(), local_index,
          tree_.parts_per_rank()};
}

void VirtualShards::require_inside(const std::string& what) const {
  if (inside_) return;
  throw Error(Code::kSyncMisuse,
              fmt::format("{} of a {} with virtual_shards outside backward_parts(): its sums would "
                          "depend on the number of ranks",
                          what, wrapper_),
              "compute the loss in the function that backward_parts() is given; evaluate without "
              "gradients (torch::NoGradGuard)");
}

void VirtualShards::require_outside(const std::string& what, const std::string& help) const {
  if (!inside_) return;
  throw Error(Code::kSyncMisuse, fmt::format("{} inside backward_parts() of a {}", what, wrapper_),
              help);
}

void VirtualShards::set_weight(double weight) {
  require_inside("set_weight()");
  weight_ = weight;
}

VirtualShards::Sums VirtualShards::exchange(const PartTree& tree, const Communicator& comm,
                                            uint64_t seed, int64_t rows,
                                            const std::vector<double>& weights,
                                            const std::vector<double>& losses) {
  std::vector<double> sent = {half_of(seed, 0), half_of(seed, 1), static_cast<double>(rows)};
  const size_t header = sent.size();
  sent.insert(sent.end(), weights.begin(), weights.end());
  sent.insert(sent.end(), losses.begin(), losses.end());
  const auto mine = torch::tensor(sent, torch::kFloat64);
  const auto all = torch::empty({comm.size(), mine.numel()}, torch::kFloat64);
  comm.all_gather(all, mine, {.label = "weights and losses of parts"});
  const auto* first = all.data_ptr<double>();
  std::vector<double> every_weight, every_loss;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const double* said = first + rank * mine.numel();
    if (said[0] != first[0] || said[1] != first[1]) {
      throw Error(Code::kSyncMisuse,
                  fmt::format("ranks {} and 0 have other seeds or are in other steps: they would "
                              "add gradients of other parts or batches",
                              rank),
                  "call torch::manual_seed() with the same number on all ranks, and resume a "
                  "checkpoint on all or none; what shall differ between parts, draw inside the "
                  "function that computes a part's loss; do not go on after an error of one rank");
    }
    if (said[2] != first[2]) {
      throw Error(Code::kSplit,
                  fmt::format("a part has {} on rank 0 and {} on rank {}",
                              counted(static_cast<int64_t>(first[2]), "row"),
                              static_cast<int64_t>(said[2]), rank),
                  "give every rank the same number of rows: another number of ranks would divide "
                  "them otherwise");
    }
    every_weight.insert(every_weight.end(), said + header, said + header + weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const double weight = said[header + i];
      // The mean over no rows is not a number.
      every_loss.push_back(weight > 0 ? weight * said[header + weights.size() + i] : 0);
    }
  }
  return {sum_in_tree(tree, every_weight), sum_in_tree(tree, every_loss)};
}

torch::Tensor VirtualShards::step(const torch::nn::Module& module, PartOwner& owner,
                                  const PartLoss& loss_of, const PartStep& how, bool continues) {
  require_not_capturing("a step of virtual shards", "run it without capture");
  require_outside("backward_parts()", "call it once for a batch");
  const struct Inside {
    explicit Inside(bool& flag) : inside(flag) { inside = true; }
    ~Inside() { inside = false; }
    bool& inside;
  } inside(inside_);
  seeds_.begin_step(continues);
  DeviceRng numbers(device_of_module(module), 0);
  std::optional<PartBuffers> buffers;
  if (tree_.parts_per_rank() > 1) buffers.emplace(module);
  std::vector<double> weights, losses;
  torch::TensorOptions form;
  {
    const FixedThreads threads(threads_);
    for (int64_t i = 0; i < tree_.parts_per_rank(); ++i) {
      const BatchPart now = part(i);
      if (buffers) buffers->begin_forward();
      owner.begin_part(now.local_index + 1 == now.local_count);
      numbers.reseed(seeds_.seed_of(now.index));
      const UseRng draw_from(numbers);
      weight_ = 1;
      const torch::Tensor loss = loss_of(now);
      if (!loss.defined() || loss.numel() != 1) {
        throw Error(Code::kUsage, "backward_parts() was given a loss that is not a scalar",
                    "return the mean over the part's rows: a tensor of one element");
      }
      backward_of_part(loss, how);
      weights.push_back(weight_);
      losses.push_back(loss.item<double>());
      form = loss.options().requires_grad(false);
      owner.take_gradients(now, weight_);
      if (buffers) buffers->end_forward(i);
    }
    if (buffers) buffers->finish();
  }
  const Sums sums = exchange(tree_, comm_, seeds_.seed_of(0), /*rows=*/0, weights, losses);
  if (sums.weight == 0) {
    throw Error(Code::kUsage, "the weights of all parts are zero",
                "give at least one part a weight; a weight is usually its number of rows");
  }
  owner.average(sums.weight);
  return torch::full({}, sums.loss / sums.weight, form);
}

}  // namespace lockstep
