#include "lockstep/optim.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <utility>

#include "base/mutation.hpp"
#include "lockstep/error.hpp"
#include "optim/gpu_step.hpp"
#include "optim/optimizer_state.hpp"
#include "optim/step_items.hpp"

namespace lockstep {
namespace {

// What Adam and AdamW do not share.
template <class TorchAdam>
struct AdamKind;

template <>
struct AdamKind<torch::optim::Adam> {
  static constexpr std::string_view kName = "Adam";
  static constexpr bool kDecoupledDecay = false;
  using Options = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
};

template <>
struct AdamKind<torch::optim::AdamW> {
  static constexpr std::string_view kName = "AdamW";
  static constexpr bool kDecoupledDecay = true;
  using Options = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
};

template <class TorchAdam>
using OptionsOf = typename AdamKind<TorchAdam>::Options;
template <class TorchAdam>
using StateOf = typename AdamKind<TorchAdam>::State;

template <class TorchAdam, class Options>
OptionsOf<TorchAdam> adam_options(const Options& options) {
  return OptionsOf<TorchAdam>(options.lr)
      .betas({options.beta1, options.beta2})
      .eps(options.eps)
      .weight_decay(options.weight_decay);
}

template <class TorchAdam>
void check_options(const ParamGroups& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!static_cast<const OptionsOf<TorchAdam>&>(groups[i].options()).amsgrad()) continue;
    constexpr auto kName = AdamKind<TorchAdam>::kName;
    throw Error(Code::kUsage,
                fmt::format("lockstep::{} has no amsgrad, and group {} asks for it", kName, i),
                fmt::format("leave amsgrad off, or use torch::optim::{}", kName));
  }
}

template <class State>
struct ItemState {
  State* state = nullptr;
  bool is_new = false;
};

// Returns the state of each item. All new states share an allocation.
template <class State>
std::vector<ItemState<State>> states_of(torch::optim::Optimizer& optimizer,
                                        const StepItems& items) {
  std::vector<ItemState<State>> states(items.size());
  std::vector<size_t> missing;
  std::vector<torch::Tensor> models;
  for (size_t i = 0; i < items.size(); ++i) {
    const torch::Tensor& weight = items[i].weight;
    State& state = state_of<State>(optimizer, items[i].parameter);
    states[i].state = &state;
    if (state.exp_avg().defined()) {
      state.exp_avg(fit_state(state.exp_avg(), weight, "exp_avg"));
      state.exp_avg_sq(fit_state(state.exp_avg_sq(), weight, "exp_avg_sq"));
    } else {
      states[i].is_new = true;
      missing.push_back(i);
      models.insert(models.end(), {weight, weight});
    }
  }
  const auto made = zeros_like_all(models);
  for (size_t m = 0; m < missing.size(); ++m) {
    states[missing[m]].state->exp_avg(made[2 * m]);
    states[missing[m]].state->exp_avg_sq(made[2 * m + 1]);
  }
  return states;
}

template <class TorchAdam>
std::vector<GroupRates> group_rates(const ParamGroups& groups) {
  std::vector<GroupRates> rates(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = static_cast<const OptionsOf<TorchAdam>&>(groups[i].options());
    rates[i].lr = options.lr();
    rates[i].weight_decay = options.weight_decay();
    rates[i].decoupled = AdamKind<TorchAdam>::kDecoupledDecay ? 1 : 0;
    rates[i].beta1 = std::get<0>(options.betas());
    rates[i].beta2 = std::get<1>(options.betas());
    rates[i].eps = options.eps();
  }
  return rates;
}

template <class TorchAdam>
AdamRates adam_rates(const OptionsOf<TorchAdam>& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  AdamRates rates;
  if (AdamKind<TorchAdam>::kDecoupledDecay) {
    rates.decay = 1 - options.lr() * options.weight_decay();
    if (is_planted(Mutation::kWeightDecayTwice)) rates.decay *= rates.decay;
  } else {
    rates.gradient_decay = options.weight_decay();
  }
  rates.beta1 = beta1;
  rates.beta2 = beta2;
  rates.step_size = options.lr() / (1 - std::pow(beta1, t));
  rates.root_factor = 1 / std::sqrt(1 - std::pow(beta2, t));
  rates.eps = options.eps();
  return rates;
}

}  // namespace

template <class TorchAdam>
FusedAdam<TorchAdam>::FusedAdam(std::vector<torch::Tensor> parameters, const Options& options)
    : TorchAdam(without_repeats(parameters), adam_options<TorchAdam>(options)),
      masters_(options.masters) {
  check_parameters(this->param_groups(), masters_, AdamKind<TorchAdam>::kName);
}

template <class TorchAdam>
FusedAdam<TorchAdam>::FusedAdam(ParamGroups groups, const Options& defaults)
    : TorchAdam(without_repeats(std::move(groups)), adam_options<TorchAdam>(defaults)),
      masters_(defaults.masters) {
  check_options<TorchAdam>(this->param_groups());
  check_parameters(this->param_groups(), masters_, AdamKind<TorchAdam>::kName);
}

template <class TorchAdam>
torch::Tensor FusedAdam<TorchAdam>::step(LossClosure closure) {
  const torch::Tensor loss = run_closure(closure);
  step_fused({}, {});
  return loss;
}

template <class TorchAdam>
torch::Tensor FusedAdam<TorchAdam>::step(const StepExtras& extras) {
  return step_fused({}, extras);
}

template <class TorchAdam>
torch::Tensor FusedAdam<TorchAdam>::step_fused(const ScaledGradients& gradients,
                                               const StepExtras& extras) {
  const torch::NoGradGuard no_grad;
  check_options<TorchAdam>(this->param_groups());  // a group may have been added or loaded
  check_extras(extras);
  const StepItems items(this->param_groups(), masters_, AdamKind<TorchAdam>::kName);
  const ScaledGradients known = items.with_squares(gradients, this->param_groups(), extras);
  if (items.empty()) return norm_without_gradients(known, extras);
  const RecordedUpdate recorded(*this, masters_);
  const torch::Tensor norm =
      items.on_cuda() ? step_on_cuda(items, known, extras) : step_on_cpu(items, known, extras);
  recorded.end(known, extras, norm);
  return norm;
}

template <class TorchAdam>
torch::Tensor FusedAdam<TorchAdam>::step_on_cpu(const StepItems& items,
                                                const ScaledGradients& gradients,
                                                const StepExtras& extras) {
  if (skips_on_cpu(items, gradients)) {
    items.finish(false, extras);
    return {};
  }
  store_gpu_steps();
  slots_ = nullptr;  // the model may have been on a GPU
  const torch::Tensor norm = gradient_norm(gradients, extras);
  const double factor = gradient_factor(gradients, extras, norm);
  const auto states = states_of<StateOf<TorchAdam>>(*this, items);
  std::vector<AdamRates> rates(items.size());
  std::vector<UpdatePiece> pieces(items.size());
  std::vector<Dtype> dtypes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& group = this->param_groups()[items[i].group];
    auto& state = *states[i].state;
    state.step(state.step() + 1);
    rates[i] = adam_rates<TorchAdam>(static_cast<const OptionsOf<TorchAdam>&>(group.options()),
                                     state.step());
    rates[i].gradient_factor = factor;
    rates[i].store_gradient = factor != 1 && !extras.zero_grad;
    pieces[i] = piece_of(items[i], state.exp_avg(), state.exp_avg_sq());
    dtypes[i] = dtype_of(items[i]);
  }
  for_each_part(pieces, dtypes,
                [&](size_t i, const UpdatePiece& part) { update_adam(dtypes[i], rates[i], part); });
  items.round_masters();
  items.finish(factor != 1, extras);
  return norm;
}

template <class TorchAdam>
torch::Tensor FusedAdam<TorchAdam>::step_on_cuda([[maybe_unused]] const StepItems& items,
                                                 [[maybe_unused]] const ScaledGradients& gradients,
                                                 [[maybe_unused]] const StepExtras& extras) {
  torch::Tensor norm;
#if LOCKSTEP_CUDA
  if (slots_ != nullptr && slots_->any_moved(items)) {
    store_gpu_steps();
    slots_ = nullptr;
  }
  if (slots_ == nullptr) slots_ = std::make_shared<GpuSlots>();
  const auto states = states_of<StateOf<TorchAdam>>(*this, items);
  const auto slots = slots_->of(items);
  std::vector<GpuItemState> on_gpu(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    auto& state = *states[i].state;
    on_gpu[i] = {state.exp_avg(), state.exp_avg_sq(), slots[i].slot, -1};
    if (states[i].is_new || slots[i].is_new) on_gpu[i].start = state.step();
  }
  norm = step_on_gpus(
      GpuOptimizer::kAdam, items, on_gpu,
      [this] { return group_rates<TorchAdam>(this->param_groups()); }, gradients, extras);
  keep_for_replays(slots_, on_gpu);
#endif
  return norm;
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::zero_grad(bool set_to_none) {
  zero_gradients(this->param_groups(), set_to_none);
}

template <class TorchAdam>
bool FusedAdam<TorchAdam>::has_master(const torch::Tensor& parameter) const {
  return masters_ && masters_->holds(parameter);
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::store_gpu_steps() const {
#if LOCKSTEP_CUDA
  if (slots_ == nullptr) return;
  for (const auto& [parameter, steps] : slots_->steps()) {
    const auto found = this->state().find(compat::optimizer_state_key(parameter));
    if (found != this->state().end()) {
      static_cast<StateOf<TorchAdam>&>(*found->second).step(steps);
    }
  }
#endif
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::collect_state() const {
  store_gpu_steps();
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::note_loaded_state() {
  slots_ = nullptr;
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::save(torch::serialize::OutputArchive& archive) const {
  store_gpu_steps();
  TorchAdam::save(archive);
  save_masters(this->param_groups(), masters_, archive);
}

template <class TorchAdam>
void FusedAdam<TorchAdam>::load(torch::serialize::InputArchive& archive) {
  const auto masters = read_masters(this->param_groups(), masters_, archive);
  TorchAdam::load(archive);
  note_loaded_state();
  put_masters(this->param_groups(), masters_, masters);
}

template class FusedAdam<torch::optim::Adam>;
template class FusedAdam<torch::optim::AdamW>;

}  // namespace lockstep
