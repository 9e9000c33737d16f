#include "lockstep/adamw.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/error.hpp"
#include "optim/common.hpp"
#include "optim/for_each_part.hpp"
#include "optim/gpu_step.hpp"
#include "optim/state_memory.hpp"
#include "optim/step_items.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kName = "AdamW";

using Options = torch::optim::AdamWOptions;
using State = torch::optim::AdamWParamState;

Options torch_options(const AdamWOptions& options) {
  return Options(options.lr)
      .betas({options.beta1, options.beta2})
      .eps(options.eps)
      .weight_decay(options.weight_decay);
}

void check_options(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!static_cast<const Options&>(groups[i].options()).amsgrad()) continue;
    throw Error(Code::kUsage,
                fmt::format("lockstep::AdamW has no amsgrad, and group {} asks for it", i),
                "leave amsgrad off, or use torch::optim::AdamW");
  }
}

struct ItemState {
  State* state = nullptr;
  bool is_new = false;
};

// [item]. New states of all items share an allocation.
std::vector<ItemState> states_of(torch::optim::Optimizer& optimizer, const StepItems& items) {
  std::vector<ItemState> states(items.size());
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

[[maybe_unused]] std::vector<GroupRates> group_rates(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<GroupRates> rates(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& options = static_cast<const Options&>(groups[i].options());
    rates[i].lr = options.lr();
    rates[i].weight_decay = options.weight_decay();
    rates[i].beta1 = std::get<0>(options.betas());
    rates[i].beta2 = std::get<1>(options.betas());
    rates[i].eps = options.eps();
  }
  return rates;
}

AdamWRates rates_of(const Options& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(step);
  AdamWRates rates;
  rates.decay = 1 - options.lr() * options.weight_decay();
  rates.beta1 = beta1;
  rates.beta2 = beta2;
  rates.step_size = options.lr() / (1 - std::pow(beta1, t));
  rates.root_factor = 1 / std::sqrt(1 - std::pow(beta2, t));
  rates.eps = options.eps();
  return rates;
}

}  // namespace

AdamW::AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options)
    : torch::optim::AdamW(without_repeats(parameters), torch_options(options)),
      masters_(options.masters) {
  check_parameters(param_groups(), masters_, kName);
}

AdamW::AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamWOptions& defaults)
    : torch::optim::AdamW(without_repeats(std::move(groups)), torch_options(defaults)),
      masters_(defaults.masters) {
  check_options(param_groups());
  check_parameters(param_groups(), masters_, kName);
}

torch::Tensor AdamW::step(LossClosure closure) {
  const torch::Tensor loss = run_closure(closure);
  step_fused({}, {});
  return loss;
}

void AdamW::step(const StepExtras& extras) {
  step_fused({}, extras);
}

void AdamW::step_fused(const ScaledGradients& gradients, const StepExtras& extras) {
  const torch::NoGradGuard no_grad;
  check_options(param_groups());  // a group may have been added, or options loaded
  const StepItems items(param_groups(), masters_, kName);
  if (items.empty()) return;
  check_extras(extras);
  if (items.on_cuda()) {
    step_on_cuda(items, gradients, extras);
  } else {
    step_on_cpu(items, gradients, extras);
  }
}

void AdamW::step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                        const StepExtras& extras) {
  if (skips_on_cpu(items, gradients)) return items.finish(false, extras);
  store_gpu_steps();
  slots_ = nullptr;  // the model came back from a GPU
  const double factor = items.gradient_factor(gradients, extras);
  const auto states = states_of(*this, items);
  std::vector<AdamWRates> rates(items.size());
  std::vector<UpdatePiece> pieces(items.size());
  std::vector<Dtype> dtypes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options = static_cast<const Options&>(param_groups()[items[i].group].options());
    State& state = *states[i].state;
    state.step(state.step() + 1);
    rates[i] = rates_of(options, state.step());
    rates[i].gradient_factor = factor;
    rates[i].store_gradient = factor != 1 && !extras.zero_grad;
    pieces[i] = piece_of(items[i], state.exp_avg(), state.exp_avg_sq());
    dtypes[i] = dtype_of(items[i]);
  }
  for_each_part(pieces, dtypes, [&](size_t i, const UpdatePiece& part) {
    update_adamw(dtypes[i], rates[i], part);
  });
  items.round_masters();
  items.finish(factor != 1, extras);
}

void AdamW::step_on_cuda([[maybe_unused]] const StepItems& items,
                         [[maybe_unused]] const ScaledGradients& gradients,
                         [[maybe_unused]] const StepExtras& extras) {
#if LOCKSTEP_CUDA
  if (slots_ != nullptr && slots_->any_moved(items)) {
    store_gpu_steps();
    slots_ = nullptr;
  }
  if (slots_ == nullptr) slots_ = std::make_shared<GpuSlots>();
  const auto states = states_of(*this, items);
  const auto slots = slots_->of(items);
  std::vector<GpuItemState> on_gpu(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    State& state = *states[i].state;
    on_gpu[i] = {state.exp_avg(), state.exp_avg_sq(), slots[i].slot, -1};
    if (states[i].is_new || slots[i].is_new) on_gpu[i].start = state.step();
  }
  step_on_gpus(
      GpuOptimizer::kAdamW, items, on_gpu, [this] { return group_rates(param_groups()); },
      gradients, extras);
  keep_for_replays(slots_, on_gpu);
#endif
}

void AdamW::zero_grad(bool set_to_none) {
  zero_gradients(param_groups(), set_to_none);
}

bool AdamW::has_master(const torch::Tensor& parameter) const {
  return masters_ && masters_->holds(parameter);
}

void AdamW::store_gpu_steps() const {
#if LOCKSTEP_CUDA
  if (slots_ == nullptr) return;
  for (const auto& [parameter, steps] : slots_->steps()) {
    const auto found = state().find(compat::optimizer_state_key(parameter));
    if (found != state().end()) static_cast<State&>(*found->second).step(steps);
  }
#endif
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  store_gpu_steps();
  torch::optim::AdamW::save(archive);
  save_masters(param_groups(), masters_, archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  const auto masters = read_masters(param_groups(), masters_, archive);
  torch::optim::AdamW::load(archive);
  slots_ = nullptr;
  put_masters(param_groups(), masters_, masters);
}

}  // namespace lockstep
