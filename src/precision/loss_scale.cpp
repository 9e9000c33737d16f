#include "precision/loss_scale.hpp"

#include <ATen/ops/_amp_update_scale.h>
#include <fmt/format.h>

#include <cmath>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void require(bool holds, const std::string& what, const std::string& help) {
  if (!holds) throw Error(Code::kUsage, "GradScaler: " + what, help);
}

void require_usable(const GradScalerState& state) {
  require_scale(state.scale);
  require(std::isfinite(state.growth_factor) && state.growth_factor > 1,
          fmt::format("a growth factor of {} does not grow", state.growth_factor),
          "give a number above 1; PyTorch's is 2");
  require(state.backoff_factor > 0 && state.backoff_factor < 1,
          fmt::format("a backoff factor of {} does not shrink", state.backoff_factor),
          "give a number between 0 and 1; PyTorch's is 0.5");
  require(state.growth_interval >= 1,
          fmt::format("a growth interval of {} steps", state.growth_interval),
          "give at least 1; PyTorch's is 2000");
  require(state.growth_tracker >= 0 && state.growth_tracker < state.growth_interval,
          fmt::format("{} finite steps counted, with a growth interval of {}", state.growth_tracker,
                      state.growth_interval),
          "the saved state is damaged: start from a whole one");
}

}  // namespace

void require_scale(double scale) {
  const auto rounded = static_cast<float>(scale);
  require(std::isfinite(rounded) && rounded > 0, fmt::format("{} cannot be a scale", scale),
          "give a positive number that a float can hold; PyTorch starts with 65536");
}

LossScale::LossScale(const GradScalerState& state) {
  load(state);
}

void LossScale::load(const GradScalerState& state) {
  require_usable(state);
  state_ = state;
  state_.scale = static_cast<float>(state.scale);
  if (on_gpu()) fill_tensors();
}

void LossScale::fill_tensors() {
  scale_.fill_(state_.scale);
  tracker_.fill_(state_.growth_tracker);
}

torch::Tensor LossScale::multiply(const torch::Tensor& loss) {
  if (!placed_ && loss.is_cuda()) {
    const auto options = torch::TensorOptions(loss.device());
    scale_ = torch::empty({}, options.dtype(torch::kFloat));
    tracker_ = torch::empty({}, options.dtype(torch::kInt));
    fill_tensors();
  }
  placed_ = true;
  // A tensor, also on the host: its dtype takes part in promotion, and fp16 cannot hold 65536.
  return loss * (on_gpu() ? scale_.to(loss.device(), /*non_blocking=*/true)
                          : torch::scalar_tensor(state_.scale, torch::kFloat));
}

float LossScale::inverse() const {
  return static_cast<float>(1 / value());
}

torch::Tensor LossScale::inverse_on(torch::Device device) const {
  if (!on_gpu()) return torch::full({}, inverse(), torch::TensorOptions(device));
  return scale_.to(torch::kDouble).reciprocal().to(torch::kFloat).to(device, /*non_blocking=*/true);
}

void LossScale::update(bool found_inf) {
  if (on_gpu()) {
    update(torch::full({}, found_inf ? 1.0 : 0.0, scale_.options()));
  } else if (found_inf) {
    state_.scale = static_cast<float>(state_.scale * state_.backoff_factor);
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker == state_.growth_interval) {
    const auto grown = static_cast<float>(state_.scale * state_.growth_factor);
    if (std::isfinite(grown)) state_.scale = grown;
    state_.growth_tracker = 0;
  }
}

void LossScale::update(torch::Tensor found_inf) {
  at::_amp_update_scale_(scale_, tracker_, found_inf, state_.growth_factor, state_.backoff_factor,
                         state_.growth_interval);
}

void LossScale::set(double scale) {
  require_scale(scale);
  state_.scale = static_cast<float>(scale);
  if (on_gpu()) scale_.fill_(state_.scale);
}

double LossScale::value() const {
  return on_gpu() ? scale_.item<float>() : state_.scale;
}

GradScalerState LossScale::state() const {
  GradScalerState state = state_;
  state.scale = value();
  if (on_gpu()) state.growth_tracker = tracker_.item<int>();
  return state;
}

}  // namespace lockstep
