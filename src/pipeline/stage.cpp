#include "pipeline/stage.hpp"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/torch.h>
#include <cmath>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

#include "base/counted.hpp"
#include "device/streams.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

// Guard: restores buffers such as running means, so that forwards inside leave no trace in them.
class KeepBuffers {
 public:
  explicit KeepBuffers(const torch::nn::Module& module) : buffers_(module.buffers()) {
    const torch::NoGradGuard no_grad;
    for (const auto& buffer : buffers_) values_.push_back(buffer.detach().clone());
  }
  ~KeepBuffers() {
    const torch::NoGradGuard no_grad;
    // The alias has a version counter of its own: a graph may have saved the buffer, but a training
    // backward does not read it.
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].variable_data().copy_(values_[i]);
  }
  KeepBuffers(const KeepBuffers&) = delete;
  KeepBuffers& operator=(const KeepBuffers&) = delete;

 private:
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;  // [buffer]
};

// Each logical device gets its own copy, also where all are in the host's memory.
void move_to(const Device& device, torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto move = [&](torch::Tensor& tensor) {
    if (!tensor.defined() || device.owns(tensor)) return;
    const auto moved = [&](const torch::Tensor& from) {
      keep_for_current_stream(from);  // released while this stream still copies
      return from.detach().to(device.torch_device(), from.scalar_type(), /*non_blocking=*/false,
                              /*copy=*/true);
    };
    const torch::Tensor grad = tensor.grad();
    tensor.set_data(moved(tensor));
    if (grad.defined()) tensor.mutable_grad() = moved(grad);
  };
  for (auto& parameter : module.parameters()) move(parameter);
  for (auto& buffer : module.buffers()) move(buffer);
}

uint64_t seed_of(const MicroBatchFacts& facts, int stage) {
  const std::array<uint64_t, 3> parts = {facts.step_seed, static_cast<uint64_t>(stage),
                                         static_cast<uint64_t>(facts.part)};
  return XXH3_64bits(parts.data(), sizeof(parts));
}

// Guard: a pass without gradients caches no casts of weights. A later pass inside the same Autocast
// would use them, and they are not connected to the weights.
class NoCastCache {
 public:
  NoCastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoCastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  NoCastCache(const NoCastCache&) = delete;
  NoCastCache& operator=(const NoCastCache&) = delete;

 private:
  bool before_;
};

bool may_have_gradient(const torch::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// What the previous stage gets: zeros where this stage did not use its input.
torch::Tensor gradient_to_send(const MicroBatchFacts& facts, const torch::Tensor& input,
                               const torch::Tensor& found) {
  if (!facts.wants_input_gradient || found.defined()) return found;
  return torch::zeros_like(input);
}

constexpr int kMeasurements = 3;

void require_cut(int64_t layers, std::span<const int64_t> layers_per_stage) {
  const int64_t total =
      std::accumulate(layers_per_stage.begin(), layers_per_stage.end(), int64_t{0});
  const bool any_empty = std::any_of(layers_per_stage.begin(), layers_per_stage.end(),
                                     [](int64_t count) { return count < 1; });
  if (total == layers && !any_empty) return;
  throw Error(Code::kStageMismatch,
              fmt::format("{} cannot be cut into {} of {} in all{}", counted(layers, "layer"),
                          counted(layers_per_stage.size(), "stage"), counted(total, "layer"),
                          any_empty ? ", one without a layer" : ""),
              "give every stage at least one layer, and as many in all as the model has");
}

// Times forward and backward of one layer alone, in nanoseconds; replaces `rows` by its output.
int64_t time_layer(torch::nn::AnyModule& layer, torch::Tensor& rows) {
  const torch::Tensor leaf = rows.detach();
  if (leaf.is_floating_point()) leaf.requires_grad_();
  const torch::Tensor input = leaf.clone();  // a layer may work in place, but not on a leaf
  const int64_t begin_ns = monotonic_ns();
  const torch::Tensor output = layer.forward(input);
  std::vector<torch::Tensor> wanted;
  for (const auto& parameter : layer.ptr()->parameters()) {
    if (parameter.requires_grad()) wanted.push_back(parameter);
  }
  if (leaf.requires_grad()) wanted.push_back(leaf);
  if (output.requires_grad() && !wanted.empty()) {
    torch::autograd::grad({output}, wanted, {torch::ones_like(output)}, /*retain_graph=*/false,
                          /*create_graph=*/false, /*allow_unused=*/true);
  }
  if (output.is_cuda()) torch::cuda::synchronize(output.device().index());
  const int64_t took_ns = monotonic_ns() - begin_ns;
  rows = output.detach();
  return took_ns;
}

}  // namespace

Stage::Stage(int index, torch::nn::Sequential module, Device& device, bool recompute,
             std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss)
    : index_(index),
      module_(std::move(module)),
      device_(device),
      recompute_(recompute),
      loss_(std::move(loss)),
      rng_(device.torch_device(), index) {
  move_to(device_, *module_);
}

torch::Tensor Stage::compute(const MicroBatchFacts& facts, const torch::Tensor& input) {
  const UseRng random(rng_);
  rng_.reseed(seed_of(facts, index_));
  std::optional<WatchedForward> watched(device_.torch_device());
  const torch::Tensor output = module_->forward(input);
  watched.reset();
  if (!is_last() || !facts.has_loss) return output;
  const torch::Tensor loss = loss_(output, facts.target);
  if (facts.compares_loss) compare_loss(facts, output, loss);
  return loss;
}

bool LossComparison::differs() const {
  constexpr double kRounding = 1e-3;  // only the order of the additions may differ
  return std::abs(together - apart) > kRounding * std::max(std::abs(together), std::abs(apart));
}

// A few rows of each micro-batch are enough, and take little memory. Not compared are losses of a
// low precision, targets that do not belong to rows of the output, and what the loss function
// refuses.
void Stage::compare_loss(const MicroBatchFacts& facts, const torch::Tensor& output,
                         const torch::Tensor& loss) {
  constexpr int64_t kRows = 8;
  const bool has_rows = output.dim() > 0 && facts.target.dim() > 0 && output.size(0) > 0 &&
                        output.size(0) == facts.target.size(0);
  const bool exact = loss.scalar_type() == torch::kFloat || loss.scalar_type() == torch::kDouble;
  if (!has_rows || !exact) return;
  const torch::NoGradGuard no_grad;
  const int64_t rows = std::min(kRows, output.size(0));
  Compared mine{output.detach().narrow(0, 0, rows).clone(), facts.target.narrow(0, 0, rows)};
  if (!compared_.output.defined()) {
    compared_ = std::move(mine);
    return;
  }
  const Compared first = std::exchange(compared_, {});
  try {
    const auto loss_of = [this](const torch::Tensor& out, const torch::Tensor& target) {
      return loss_(out, target).item<double>();
    };
    const auto first_rows = static_cast<double>(first.output.size(0));
    const auto mine_rows = static_cast<double>(rows);
    const double apart = (loss_of(first.output, first.target) * first_rows +
                          loss_of(mine.output, mine.target) * mine_rows) /
                         (first_rows + mine_rows);
    comparison_ = LossComparison{
        loss_of(torch::cat({first.output, mine.output}), torch::cat({first.target, mine.target})),
        apart};
  } catch (const std::exception&) {
    return;
  }
}

torch::Tensor Stage::forward(const MicroBatchFacts& facts, const torch::Tensor& input) {
  Held held;
  held.input = input.detach();
  if (facts.wants_input_gradient && may_have_gradient(held.input)) held.input.requires_grad_();
  torch::Tensor output;
  if (recompute_) {
    output = compute_for_later(facts, held.input);
  } else {
    const torch::AutoGradMode grad_mode(true);
    output = held.output = compute(facts, held.input);
  }
  held_[facts.index] = std::move(held);
  if (is_last() && !facts.has_loss) return torch::zeros({}, device_.torch_device());
  return output.detach();
}

// Only the input is kept, so the module must not change it.
torch::Tensor Stage::compute_for_later(const MicroBatchFacts& facts, const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  const NoCastCache casts;
  const auto version = input._version();
  const torch::Tensor output = compute(facts, input);
  if (input._version() == version) return output;
  throw Error(Code::kUsage, "a stage that is recomputed changed its input in place",
              "let its first layer make a new tensor, or remove the stage from "
              "PipelineOptions::recompute");
}

Stage::Held Stage::take(const MicroBatchFacts& facts) {
  auto node = held_.extract(facts.index);
  Held held = std::move(node.mapped());
  if (recompute_) {
    const KeepBuffers buffers(*module_);
    const torch::AutoGradMode grad_mode(true);
    held.output = compute(facts, held.input);
  }
  return held;
}

torch::Tensor Stage::root_gradient(const MicroBatchFacts& facts, const Held& held,
                                   const torch::Tensor& gradient) const {
  if (!is_last()) return gradient;
  // See Note [Micro-batches without a loss].
  if (!facts.has_loss) return torch::zeros_like(held.output);
  return facts.loss_gradient.to(held.output.dtype());
}

torch::Tensor Stage::backward(const MicroBatchFacts& facts, const torch::Tensor& gradient) {
  const Held held = take(facts);
  const Autocast off(device_, torch::kBFloat16, /*enabled=*/false);
  if (held.output.requires_grad()) {
    torch::autograd::backward({held.output}, {root_gradient(facts, held, gradient)});
  }
  return gradient_to_send(facts, held.input, held.input.grad());
}

torch::Tensor Stage::backward_input(const MicroBatchFacts& facts, const torch::Tensor& gradient) {
  Held held = take(facts);
  const Autocast off(device_, torch::kBFloat16, /*enabled=*/false);
  Held& kept = held_[facts.index];
  kept.split.emplace(held.output, root_gradient(facts, held, gradient),
                     facts.wants_input_gradient ? held.input : torch::Tensor());
  return gradient_to_send(facts, held.input, kept.split->input_gradient());
}

void Stage::backward_weight(int micro_batch) {
  auto node = held_.extract(micro_batch);
  const Autocast off(device_, torch::kBFloat16, /*enabled=*/false);
  node.mapped().split->accumulate_weights();
}

bool Stage::awaits_weights(int micro_batch) const {
  const auto found = held_.find(micro_batch);
  return found != held_.end() && found->second.split && found->second.split->is_split();
}

torch::Tensor Stage::evaluate(const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  const NoCastCache casts;
  return module_->forward(input);
}

std::vector<torch::nn::Sequential> split_stages(const torch::nn::Sequential& model,
                                                std::span<const int64_t> layers_per_stage) {
  require_cut(static_cast<int64_t>(model->size()), layers_per_stage);
  const auto children = model->named_children();
  std::vector<torch::nn::Sequential> stages;
  auto layer = model->begin();
  size_t number = 0;
  for (const int64_t count : layers_per_stage) {
    torch::nn::Sequential stage;
    for (int64_t i = 0; i < count; ++i, ++layer, ++number) {
      stage->push_back(children[number].key(), *layer);
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

std::vector<double> measure_layers(const torch::nn::Sequential& model, const torch::Tensor& rows) {
  const KeepBuffers buffers(*model);
  const torch::AutoGradMode grad_mode(true);
  std::vector<double> seconds(model->size(), std::numeric_limits<double>::infinity());
  for (int attempt = 0; attempt < kMeasurements; ++attempt) {
    torch::Tensor flowing = rows;
    size_t number = 0;
    for (auto& layer : *model.ptr()) {
      const double took_s = static_cast<double>(time_layer(layer, flowing)) * 1e-9;
      seconds[number] = std::min(seconds[number], took_s);
      ++number;
    }
  }
  return seconds;
}

}  // namespace lockstep
