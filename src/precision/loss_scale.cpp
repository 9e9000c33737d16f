#include "precision/loss_scale.hpp"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <cmath>

#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "precision/scaler_kernels.hpp"

namespace lockstep {
namespace {

void require_option(bool holds, const std::string& what, const std::string& help) {
  if (!holds) throw Error(Code::kUsage, "GradScaler: " + what, help);
}

#if LOCKSTEP_CUDA
bool same_rules(const GradScalerState& one, const GradScalerState& other) {
  return one.growth_factor == other.growth_factor && one.backoff_factor == other.backoff_factor &&
         one.growth_interval == other.growth_interval;
}
#endif

}  // namespace

void require_usable(const GradScalerState& state) {
  require_scale(state.scale);
  require_option(std::isfinite(state.growth_factor) && state.growth_factor > 1,
                 fmt::format("a growth factor of {} does not grow", state.growth_factor),
                 "give a number above 1; PyTorch's is 2");
  require_option(state.backoff_factor > 0 && state.backoff_factor < 1,
                 fmt::format("a backoff factor of {} does not shrink", state.backoff_factor),
                 "give a number between 0 and 1; PyTorch's is 0.5");
  require_option(state.growth_interval >= 1,
                 fmt::format("a growth interval of {} steps", state.growth_interval),
                 "give at least 1; PyTorch's is 2000");
  require_option(state.growth_tracker >= 0 && state.growth_tracker < state.growth_interval,
                 fmt::format("{} finite steps counted, with a growth interval of {}",
                             state.growth_tracker, state.growth_interval),
                 "the saved state is damaged: load an intact one");
}

void require_scale(double scale) {
  const auto rounded = static_cast<float>(scale);
  require_option(std::isfinite(rounded) && rounded > 0, fmt::format("{} cannot be a scale", scale),
                 "give a positive number that a float can hold; PyTorch starts with 65536");
}

LossScale::LossScale(const GradScalerState& state) {
  load(state);
}

void LossScale::load(const GradScalerState& state) {
  require_usable(state);
  if (on_gpu()) require_not_capturing("GradScaler::load_state_dict()", "load before the step");
  state_ = state;
  state_.scale = static_cast<float>(state.scale);
  if (!on_gpu()) return;
  scale_.fill_(state_.scale);
  tracker_.fill_(state_.growth_tracker);
}

void LossScale::move_to(torch::Device gpu) {
#if LOCKSTEP_CUDA
  require_not_capturing("the first loss of a GradScaler",
                        "let a step run before it is captured (CaptureOptions::warmup)");
  static_assert(sizeof(GpuScale) == 2 * sizeof(double));
  memory_ = torch::zeros({2}, torch::device(gpu).dtype(torch::kDouble));
  scale_ = memory_.view(torch::kFloat).select(0, 0);
  tracker_ = memory_.view(torch::kInt).select(0, 1);
  scale_.fill_(state_.scale);
  tracker_.fill_(state_.growth_tracker);
  const c10::DeviceGuard current(gpu);
  ring_ = make_skip_ring();
#else
  throw Error(
      Code::kEngine,
      fmt::format("GradScaler: a loss on {}, and lockstep was built without CUDA", gpu.str()),
      "build lockstep with -DLOCKSTEP_CUDA=ON");
#endif
}

torch::Tensor LossScale::multiply(const torch::Tensor& loss) {
  if (!has_scaled_ && loss.is_cuda()) move_to(loss.device());
  has_scaled_ = true;
  if (on_gpu() && loss.is_cpu()) {
    require_not_capturing("a loss on the CPU", "compute the loss on the GPU");
  }
  // The factor is a tensor on the host too: its dtype takes part in promotion, and fp16 cannot hold
  // 65536.
  return loss * (on_gpu() ? scale_.to(loss.device(), /*non_blocking=*/loss.is_cuda())
                          : torch::scalar_tensor(state_.scale, torch::kFloat));
}

float LossScale::inverse() const {
  return static_cast<float>(1 / value());
}

torch::Tensor LossScale::inverse_on(torch::Device device) const {
  if (!on_gpu()) return torch::full({}, inverse(), torch::TensorOptions(device));
  return scale_.to(torch::kDouble).reciprocal().to(torch::kFloat).to(device, /*non_blocking=*/true);
}

void LossScale::update(bool found_inf, std::optional<double> new_scale) {
  if (on_gpu()) return settle({}, found_inf, new_scale);
  ++updates_;
  if (new_scale) {
    state_.scale = static_cast<float>(*new_scale);
  } else if (found_inf) {
    state_.scale = static_cast<float>(state_.scale * state_.backoff_factor);
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker == state_.growth_interval) {
    const auto grown = static_cast<float>(state_.scale * state_.growth_factor);
    if (std::isfinite(grown)) state_.scale = grown;
    state_.growth_tracker = 0;
  }
}

void LossScale::update(const std::vector<GpuScan>& scans, std::optional<double> new_scale) {
  settle(scans, false, new_scale);
}

void LossScale::settle([[maybe_unused]] const std::vector<GpuScan>& scans,
                       [[maybe_unused]] bool found_on_host,
                       [[maybe_unused]] std::optional<double> new_scale) {
#if LOCKSTEP_CUDA
  GpuSettleRules rules;
  rules.growth_factor = state_.growth_factor;
  rules.backoff_factor = state_.backoff_factor;
  rules.growth_interval = state_.growth_interval;
  rules.new_scale = static_cast<float>(new_scale.value_or(0));
  rules.found_on_host = found_on_host;
  settle_on_gpu(memory_, scans, rules, ring_.get());
  if (Capture* capture = Capture::current()) {
    capture->keep(std::make_shared<torch::Tensor>(memory_));
    capture->keep(ring_);
    capture->before_replay([this, captured = state_] {
      if (same_rules(state_, captured)) return;
      throw Error(Code::kCapture,
                  "the GradScaler's growth rules were loaded since its step was captured",
                  "make a new CapturedStep after load_state_dict()");
    });
  }
#endif
}

int64_t LossScale::updates() const {
  if (!on_gpu()) return updates_;
  static_assert(offsetof(GpuScale, updates) == sizeof(int64_t));
  return memory_.view(torch::kLong).select(0, 1).item<int64_t>();
}

double LossScale::value() const {
  if (!on_gpu()) return state_.scale;
  require_not_capturing("reading a GradScaler's scale", "read it after the step");
  return scale_.item<float>();
}

GradScalerState LossScale::state() const {
  GradScalerState state = state_;
  state.scale = value();
  if (on_gpu()) state.growth_tracker = tracker_.item<int>();
  return state;
}

}  // namespace lockstep
