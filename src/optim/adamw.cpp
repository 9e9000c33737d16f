#include "lockstep/adamw.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>

#include "lockstep/error.hpp"
#include "optim/common.hpp"
#include "optim/for_each_part.hpp"
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

// [item]. New states of all items share an allocation.
std::vector<State*> states_of(torch::optim::Optimizer& optimizer, const StepItems& items) {
  std::vector<State*> states(items.size());
  std::vector<size_t> missing;
  std::vector<torch::Tensor> models;
  for (size_t i = 0; i < items.size(); ++i) {
    const torch::Tensor& weight = items[i].weight;
    states[i] = &state_of<State>(optimizer, weight);
    if (states[i]->exp_avg().defined()) {
      states[i]->exp_avg(fit_state(states[i]->exp_avg(), weight, "exp_avg"));
      states[i]->exp_avg_sq(fit_state(states[i]->exp_avg_sq(), weight, "exp_avg_sq"));
    } else {
      missing.push_back(i);
      models.insert(models.end(), {weight, weight});
    }
  }
  const auto made = zeros_like_all(models);
  for (size_t m = 0; m < missing.size(); ++m) {
    states[missing[m]]->exp_avg(made[2 * m]);
    states[missing[m]]->exp_avg_sq(made[2 * m + 1]);
  }
  return states;
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
    : torch::optim::AdamW(without_repeats(parameters), torch_options(options)) {
  check_parameters(param_groups(), kName);
}

AdamW::AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamWOptions& defaults)
    : torch::optim::AdamW(without_repeats(std::move(groups)), torch_options(defaults)) {
  check_options(param_groups());
  check_parameters(param_groups(), kName);
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
  const StepItems items(param_groups(), kName);
  if (items.empty()) return;
  if (items.on_cuda()) {
    step_on_cuda(items, gradients, extras);
  } else {
    step_on_cpu(items, gradients, extras);
  }
}

void AdamW::step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                        const StepExtras& extras) {
  if (skips_on_cpu(items, gradients)) return items.finish(false, extras);
  store_device_steps();
  device_steps_.clear();  // the model came back from a GPU
  const double factor = items.gradient_factor(gradients, extras);
  const auto states = states_of(*this, items);
  std::vector<AdamWRates> rates(items.size());
  std::vector<UpdatePiece> pieces(items.size());
  std::vector<Dtype> dtypes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& options = static_cast<const Options&>(param_groups()[items[i].group].options());
    states[i]->step(states[i]->step() + 1);
    rates[i] = rates_of(options, states[i]->step());
    rates[i].gradient_factor = factor;
    rates[i].store_gradient = factor != 1 && !extras.zero_grad;
    pieces[i] = piece_of(items[i], states[i]->exp_avg(), states[i]->exp_avg_sq());
    dtypes[i] = dtype_of(items[i]);
  }
  for_each_part(pieces, dtypes, [&](size_t i, const UpdatePiece& part) {
    update_adamw(dtypes[i], rates[i], part);
  });
  items.finish(factor != 1, extras);
}

void AdamW::step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                         const StepExtras& extras) {
  const torch::Tensor divisor = items.gradient_divisor(gradients, extras);
  const auto states = states_of(*this, items);
  for (const CudaBatch& batch : items.cuda_batches()) {
    const auto& options = static_cast<const Options&>(param_groups()[batch.group].options());
    std::vector<torch::Tensor> exp_avgs;
    std::vector<torch::Tensor> exp_avg_sqs;
    std::vector<torch::Tensor> steps;
    for (const size_t i : batch.items) {
      const torch::Tensor& weight = items[i].weight;
      torch::Tensor& step = device_steps_[weight.unsafeGetTensorImpl()];
      if (!step.defined()) {
        step = torch::full({}, static_cast<double>(states[i]->step()),
                           torch::device(weight.device()).dtype(torch::kFloat32));
      }
      step = step.to(weight.device());  // the weight may have moved to another GPU
      exp_avgs.push_back(states[i]->exp_avg());
      exp_avg_sqs.push_back(states[i]->exp_avg_sq());
      steps.push_back(step);
    }
    const auto scaling = items.scaling(batch, divisor, gradients.found_inf);
    at::_foreach_add_(steps, 1);
    compat::fused_adamw_(items.weights(batch), items.gradients(batch), exp_avgs, exp_avg_sqs, steps,
                         options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
                         options.weight_decay(), options.eps(), scaling);
    if (scaling.found_inf.defined()) {
      at::_foreach_sub_(steps, std::vector<torch::Tensor>(steps.size(), scaling.found_inf));
    }
  }
  items.finish(divisor.defined(), extras);
}

void AdamW::zero_grad(bool set_to_none) {
  zero_gradients(param_groups(), set_to_none);
}

void AdamW::store_device_steps() const {
  for (const auto& [parameter, step] : device_steps_) {
    const auto found = state().find(compat::optimizer_state_key(parameter));
    if (found != state().end()) static_cast<State&>(*found->second).step(step.item<int64_t>());
  }
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  store_device_steps();
  torch::optim::AdamW::save(archive);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::AdamW::load(archive);
  device_steps_.clear();
}

}  // namespace lockstep
