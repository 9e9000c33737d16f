#include "lockstep/optim.hpp"

#include <torch/torch.h>

#include "lockstep/error.hpp"
#include "optim/gpu_step.hpp"
#include "optim/optimizer_state.hpp"
#include "optim/step_items.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kSgdName = "SGD";

using SgdGroupOptions = torch::optim::SGDOptions;
using SgdState = torch::optim::SGDParamState;

SgdGroupOptions sgd_group_options(const SgdOptions& options) {
  return SgdGroupOptions(options.lr)
      .momentum(options.momentum)
      .dampening(options.dampening)
      .weight_decay(options.weight_decay)
      .nesterov(options.nesterov);
}

// An item's momentum.
struct Momentum {
  torch::Tensor buffer;  // undefined if the group has no momentum
  bool is_new = false;   // zeros, which the step replaces by the gradient
};

std::vector<Momentum> momenta_of(torch::optim::Optimizer& optimizer, const StepItems& items) {
  std::vector<Momentum> momenta(items.size());
  std::vector<size_t> missing;
  std::vector<torch::Tensor> models;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& group = optimizer.param_groups()[items[i].group];
    if (static_cast<const SgdGroupOptions&>(group.options()).momentum() == 0) continue;
    SgdState& state = state_of<SgdState>(optimizer, items[i].parameter);
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
    state_of<SgdState>(optimizer, items[missing[m]].parameter).momentum_buffer(made[m]);
  }
  return momenta;
}

[[maybe_unused]] std::vector<GroupRates> sgd_rates(const ParamGroups& groups) {
  std::vector<GroupRates> rates(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = static_cast<const SgdGroupOptions&>(groups[i].options());
    rates[i].lr = options.lr();
    rates[i].weight_decay = options.weight_decay();
    rates[i].momentum = options.momentum();
    rates[i].dampening = options.dampening();
    rates[i].nesterov = options.nesterov() ? 1 : 0;
  }
  return rates;
}

}  // namespace

Sgd::Sgd(std::vector<torch::Tensor> parameters, const SgdOptions& options)
    : torch::optim::SGD(without_repeats(parameters), sgd_group_options(options)),
      masters_(options.masters) {
  check_parameters(param_groups(), masters_, kSgdName);
}

Sgd::Sgd(ParamGroups groups, const SgdOptions& defaults)
    : torch::optim::SGD(without_repeats(std::move(groups)), sgd_group_options(defaults)),
      masters_(defaults.masters) {
  check_parameters(param_groups(), masters_, kSgdName);
}

torch::Tensor Sgd::step(LossClosure closure) {
  const torch::Tensor loss = run_closure(closure);
  step_fused({}, {});
  return loss;
}

torch::Tensor Sgd::step(const StepExtras& extras) {
  return step_fused({}, extras);
}

torch::Tensor Sgd::step_fused(const ScaledGradients& gradients, const StepExtras& extras) {
  const torch::NoGradGuard no_grad;
  check_extras(extras);
  const StepItems items(param_groups(), masters_, kSgdName);
  const ScaledGradients known = items.with_squares(gradients, param_groups(), extras);
  if (items.empty()) return norm_without_gradients(known, extras);
  const RecordedUpdate recorded(*this, masters_);
  const torch::Tensor norm =
      items.on_cuda() ? step_on_cuda(items, known, extras) : step_on_cpu(items, known, extras);
  recorded.end(known, extras, norm);
  return norm;
}

torch::Tensor Sgd::step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                               const StepExtras& extras) {
  if (skips_on_cpu(items, gradients)) {
    items.finish(false, extras);
    return {};
  }
  slots_ = nullptr;  // the model may have been on a GPU
  const torch::Tensor norm = gradient_norm(gradients, extras);
  const double factor = gradient_factor(gradients, extras, norm);
  const auto momenta = momenta_of(*this, items);
  std::vector<SgdRates> rates(items.size());
  std::vector<UpdatePiece> pieces(items.size());
  std::vector<Dtype> dtypes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options =
        static_cast<const SgdGroupOptions&>(param_groups()[items[i].group].options());
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
  items.round_masters();
  items.finish(factor != 1, extras);
  return norm;
}

torch::Tensor Sgd::step_on_cuda([[maybe_unused]] const StepItems& items,
                                [[maybe_unused]] const ScaledGradients& gradients,
                                [[maybe_unused]] const StepExtras& extras) {
  torch::Tensor norm;
#if LOCKSTEP_CUDA
  if (slots_ == nullptr || slots_->any_moved(items)) slots_ = std::make_shared<GpuSlots>();
  const auto momenta = momenta_of(*this, items);
  const auto slots = slots_->of(items);
  std::vector<GpuItemState> states(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    states[i] = {momenta[i].buffer, {}, slots[i].slot, -1};
    if (momenta[i].is_new) {
      states[i].start = 0;  // its first update fills the buffer, even after skipped ones
    } else if (slots[i].is_new) {
      states[i].start = 1;  // the buffer was loaded or has moved with the model
    }
  }
  norm = step_on_gpus(
      GpuOptimizer::kSgd, items, states, [this] { return sgd_rates(param_groups()); }, gradients,
      extras);
  keep_for_replays(slots_, states);
#endif
  return norm;
}

void Sgd::zero_grad(bool set_to_none) {
  zero_gradients(param_groups(), set_to_none);
}

bool Sgd::has_master(const torch::Tensor& parameter) const {
  return masters_ && masters_->holds(parameter);
}

// GPUs count no steps for SGD.
void Sgd::collect_state() const {}

void Sgd::note_loaded_state() {
  slots_ = nullptr;
}

void Sgd::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::SGD::save(archive);
  save_masters(param_groups(), masters_, archive);
}

void Sgd::load(torch::serialize::InputArchive& archive) {
  const auto masters = read_masters(param_groups(), masters_, archive);
  torch::optim::SGD::load(archive);
  note_loaded_state();
  put_masters(param_groups(), masters_, masters);
}

}  // namespace lockstep
