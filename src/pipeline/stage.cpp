#include "pipeline/stage.hpp"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <utility>

#include "device/stream_order.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/error.hpp"
#include "pipeline/keep_buffers.hpp"

namespace lockstep {
namespace {

// Each logical device pays for its own weights, also where all are in the host's memory.
void move_to(const Device& device, torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto move = [&](torch::Tensor& tensor) {
    if (!tensor.defined() || device.owns(tensor)) return;
    const auto moved = [&](const torch::Tensor& from) {
      keep_for_current_stream(from);  // it is let go while this stream still copies
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
                                         static_cast<uint64_t>(facts.index)};
  return XXH3_64bits(parts.data(), sizeof(parts));
}

// Guard: a pass without gradients leaves no casts of weights behind. A later pass inside the same
// Autocast would take them, and they lead to no weight.
class NoCastsKept {
 public:
  NoCastsKept() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoCastsKept() { at::autocast::set_autocast_cache_enabled(before_); }
  NoCastsKept(const NoCastsKept&) = delete;
  NoCastsKept& operator=(const NoCastsKept&) = delete;

 private:
  bool before_;
};

bool may_have_gradient(const torch::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// What the stage before gets: also where this one made nothing of its input.
torch::Tensor gradient_to_send(const MicroBatchFacts& facts, const torch::Tensor& input,
                               const torch::Tensor& found) {
  if (!facts.wants_input_gradient || found.defined()) return found;
  return torch::zeros_like(input);
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
  const torch::Tensor output = module_->forward(input);
  return is_last() && facts.has_loss ? loss_(output, facts.target) : output;
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

// Nothing but the input is kept, so that must stay what it is.
torch::Tensor Stage::compute_for_later(const MicroBatchFacts& facts, const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  const NoCastsKept casts;
  const auto version = input._version();
  const torch::Tensor output = compute(facts, input);
  if (input._version() == version) return output;
  throw Error(Code::kUsage, "a stage that is computed again changed its input in place",
              "let its first layer make a new tensor, or take the stage out of "
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
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  if (held.output.requires_grad()) {
    torch::autograd::backward({held.output}, {root_gradient(facts, held, gradient)});
  }
  return gradient_to_send(facts, held.input, held.input.grad());
}

torch::Tensor Stage::backward_input(const MicroBatchFacts& facts, const torch::Tensor& gradient) {
  Held held = take(facts);
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  Held& kept = held_[facts.index];
  kept.split.emplace(held.output, root_gradient(facts, held, gradient),
                     facts.wants_input_gradient ? held.input : torch::Tensor());
  return gradient_to_send(facts, held.input, kept.split->input_gradient());
}

void Stage::backward_weight(int micro_batch) {
  auto node = held_.extract(micro_batch);
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  node.mapped().split->accumulate_weights();
}

torch::Tensor Stage::evaluate(const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  const NoCastsKept casts;
  return module_->forward(input);
}

}  // namespace lockstep
