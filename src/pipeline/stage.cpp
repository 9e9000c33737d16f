#include "pipeline/stage.hpp"

#include <torch/csrc/autograd/autograd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <utility>

#include "lockstep/autocast.hpp"

namespace lockstep {
namespace {

// Each logical device pays for its own weights, also where all are in the host's memory.
void move_to(const Device& device, torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto move = [&](torch::Tensor& tensor) {
    if (!tensor.defined() || device.owns(tensor)) return;
    const auto moved = [&](const torch::Tensor& from) {
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

// Guard: a forward that is run again leaves no second mark on buffers such as running means.
class KeepBuffers {
 public:
  explicit KeepBuffers(const torch::nn::Module& module) : buffers_(module.buffers()) {
    const torch::NoGradGuard no_grad;
    for (const auto& buffer : buffers_) values_.push_back(buffer.detach().clone());
  }
  ~KeepBuffers() {
    const torch::NoGradGuard no_grad;
    // Through an alias with a version of its own: the graph has saved the buffer, but a training
    // backward does not read it.
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].variable_data().copy_(values_[i]);
  }
  KeepBuffers(const KeepBuffers&) = delete;
  KeepBuffers& operator=(const KeepBuffers&) = delete;

 private:
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;  // [buffer]
};

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
  return is_last() ? loss_(output, facts.target) : output;
}

torch::Tensor Stage::forward(const MicroBatchFacts& facts, const torch::Tensor& input) {
  Held held;
  held.input = input.detach();
  if (!is_first() && held.input.is_floating_point()) held.input.requires_grad_();
  const torch::AutoGradMode grad_mode(!recompute_);
  const torch::Tensor output = compute(facts, held.input);
  if (!recompute_) held.output = output;
  held_[facts.index] = std::move(held);
  return output.detach();
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
  return is_last() ? facts.loss_gradient.to(held.output.dtype()) : gradient;
}

// What the stage before gets: also where this one made nothing of its input.
torch::Tensor Stage::gradient_to_send(const torch::Tensor& input,
                                      const torch::Tensor& found) const {
  if (is_first() || found.defined()) return found;
  return torch::zeros_like(input);
}

torch::Tensor Stage::backward(const MicroBatchFacts& facts, const torch::Tensor& gradient) {
  const Held held = take(facts);
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  if (held.output.requires_grad()) {
    torch::autograd::backward({held.output}, {root_gradient(facts, held, gradient)});
  }
  return gradient_to_send(held.input, held.input.grad());
}

torch::Tensor Stage::backward_input(const MicroBatchFacts& facts, const torch::Tensor& gradient) {
  Held held = take(facts);
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  Held& kept = held_[facts.index];
  kept.split.emplace(held.output, root_gradient(facts, held, gradient),
                     is_first() ? torch::Tensor() : held.input);
  return gradient_to_send(held.input, kept.split->input_gradient());
}

void Stage::backward_weight(int micro_batch) {
  auto node = held_.extract(micro_batch);
  const Autocast as_forward_did(device_, torch::kBFloat16, /*enabled=*/false);
  node.mapped().split->accumulate_weights();
}

torch::Tensor Stage::evaluate(const torch::Tensor& input) {
  const torch::NoGradGuard no_grad;
  return module_->forward(input);
}

}  // namespace lockstep
