#include "lockstep/sgd.hpp"

#include <torch/torch.h>

#include "lockstep/error.hpp"
#include "optim/common.hpp"
#include "optim/for_each_part.hpp"
#include "optim/state_memory.hpp"
#include "optim/step_items.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kName = "SGD";

using Options = torch::optim::SGDOptions;
using State = torch::optim::SGDParamState;

Options torch_options(const SgdOptions& options) {
  return Options(options.lr)
      .momentum(options.momentum)
      .dampening(options.dampening)
      .weight_decay(options.weight_decay)
      .nesterov(options.nesterov);
}

// An item's momentum; undefined where its group has none.
struct Momentum {
  torch::Tensor buffer;
  bool is_new = false;  // zeros, to become a copy of the gradient
};

std::vector<Momentum> momenta_of(torch::optim::Optimizer& optimizer, const StepItems& items) {
  std::vector<Momentum> momenta(items.size());
  std::vector<size_t> missing;
  std::vector<torch::Tensor> models;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& group = optimizer.param_groups()[items[i].group];
    if (static_cast<const Options&>(group.options()).momentum() == 0) continue;
    State& state = state_of<State>(optimizer, items[i].weight);
    if (state.momentum_buffer().defined()) {
      state.momentum_buffer(fit_state(state.momentum_buffer(), items[i].weight, "momentum buffer"));
      momenta[i].buffer = state.momentum_buffer();
    } else {
      missing.push_back(i);
      models.push_back(items[i].weight);
    }
  }
  const auto made = zeros_like_all(models);
  for (size_t m = 0; m < missing.size(); ++m) {
    momenta[missing[m]] = {made[m], true};
    state_of<State>(optimizer, items[missing[m]].weight).momentum_buffer(made[m]);
  }
  return momenta;
}

// Whether a step was skipped is known to the GPU only. With dampening the next step would have to
// know it, for the first buffer is the gradient, undamped.
void check_first_step(const torch::optim::Optimizer& optimizer, const StepItems& items,
                      const ScaledGradients& gradients) {
  if (!gradients.found_inf.defined()) return;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& group = optimizer.param_groups()[items[i].group];
    const auto& options = static_cast<const Options&>(group.options());
    if (options.momentum() == 0 || options.dampening() == 0) continue;
    const auto key = compat::optimizer_state_key(items[i].weight.unsafeGetTensorImpl());
    if (optimizer.state().find(key) != optimizer.state().end()) continue;
    throw Error(Code::kUsage,
                "lockstep::Sgd cannot begin with dampening under a GradScaler on a GPU, where the "
                "first step may be skipped",
                "set dampening to 0, or use torch::optim::SGD");
  }
}

}  // namespace

Sgd::Sgd(std::vector<torch::Tensor> parameters, const SgdOptions& options)
    : torch::optim::SGD(without_repeats(parameters), torch_options(options)) {
  check_parameters(param_groups(), kName);
}

Sgd::Sgd(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& defaults)
    : torch::optim::SGD(without_repeats(std::move(groups)), torch_options(defaults)) {
  check_parameters(param_groups(), kName);
}

torch::Tensor Sgd::step(LossClosure closure) {
  const torch::Tensor loss = run_closure(closure);
  step_fused({}, {});
  return loss;
}

void Sgd::step(const StepExtras& extras) {
  step_fused({}, extras);
}

void Sgd::step_fused(const ScaledGradients& gradients, const StepExtras& extras) {
  const torch::NoGradGuard no_grad;
  const StepItems items(param_groups(), kName);
  if (items.empty()) return;
  if (items.on_cuda()) {
    step_on_cuda(items, gradients, extras);
  } else {
    step_on_cpu(items, gradients, extras);
  }
}

void Sgd::step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                      const StepExtras& extras) {
  if (skips_on_cpu(items, gradients)) return items.finish(false, extras);
  const double factor = items.gradient_factor(gradients, extras);
  const auto momenta = momenta_of(*this, items);
  std::vector<SgdRates> rates(items.size());
  std::vector<UpdatePiece> pieces(items.size());
  std::vector<Dtype> dtypes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options = static_cast<const Options&>(param_groups()[items[i].group].options());
    rates[i].gradient_factor = factor;
    rates[i].lr = options.lr();
    rates[i].weight_decay = options.weight_decay();
    rates[i].keep = momenta[i].is_new ? 0 : options.momentum();
    rates[i].take = momenta[i].is_new ? 1 : 1 - options.dampening();
    rates[i].nesterov = options.nesterov();
    rates[i].nesterov_factor = options.momentum();
    rates[i].store_gradient = factor != 1 && !extras.zero_grad;
    pieces[i] = piece_of(items[i], momenta[i].buffer, {});
    dtypes[i] = dtype_of(items[i]);
  }
  for_each_part(pieces, dtypes,
                [&](size_t i, const UpdatePiece& part) { update_sgd(dtypes[i], rates[i], part); });
  items.finish(factor != 1, extras);
}

void Sgd::step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                       const StepExtras& extras) {
  check_first_step(*this, items, gradients);
  const torch::Tensor divisor = items.gradient_divisor(gradients, extras);
  const auto momenta = momenta_of(*this, items);
  for (const CudaBatch& batch : items.cuda_batches()) {
    const auto& options = static_cast<const Options&>(param_groups()[batch.group].options());
    // Where nothing is damped, zeros already make the first buffer a copy of the gradient.
    CudaBatch parts[2] = {{batch.group, {}}, {batch.group, {}}};  // [is it a first step?]
    for (const size_t i : batch.items) {
      parts[momenta[i].is_new && options.dampening() != 0 ? 1 : 0].items.push_back(i);
    }
    for (const bool first : {false, true}) {
      const CudaBatch& part = parts[first ? 1 : 0];
      if (part.items.empty()) continue;
      std::vector<torch::Tensor> buffers;
      for (const size_t i : part.items) {
        if (momenta[i].buffer.defined()) buffers.push_back(momenta[i].buffer);
      }
      compat::fused_sgd_(items.weights(part), items.gradients(part), buffers,
                         options.weight_decay(), options.momentum(), options.lr(),
                         options.dampening(), options.nesterov(), first,
                         items.scaling(part, divisor, gradients.found_inf));
    }
  }
  items.finish(divisor.defined(), extras);
}

void Sgd::zero_grad(bool set_to_none) {
  zero_gradients(param_groups(), set_to_none);
}

}  // namespace lockstep
