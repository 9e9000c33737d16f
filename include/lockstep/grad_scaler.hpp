#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/fused_optimizer.hpp"

namespace lockstep {

/// An update that was skipped because a gradient was infinite or NaN.
struct SkippedStep {
  int64_t step = 0;       ///< number of the update() call, from 1
  std::string parameter;  ///< the first whose gradient overflowed
  double scale_before = 0;
  double scale_after = 0;
};

/// The first scale, how it changes, and whom a skipped step concerns.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
  bool enabled = true;             ///< false: every call passes through, and the scale is 1

  /// Ranks that hold parts of one model and must skip a step together. Data-parallel ranks need
  /// not be named: their averaged gradients overflow together. Tensor parallel layers and stages of
  /// a Pipeline over ranks are known too, unless one of their ranks has no gradient at all.
  std::optional<Communicator> model_parallel = {};

  /// Called for every skipped step. On a GPU the call may come some steps late, because the host
  /// does not wait for the device.
  std::function<void(const SkippedStep&)> on_skip = {};
};

/// Everything that two scalers need to continue alike: the fields of PyTorch's state_dict.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;
};

/// Multiplies losses so that small gradients survive fp16, and skips updates that overflowed.
/// Follows torch.amp.GradScaler's rules, on CPU and CUDA:
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);   // unscales; updates unless a gradient is not finite
///     scaler.update();          // adapts the scale
///
/// Between two updates each optimizer goes from ready to unscaled to stepped. Any other order is an
/// Error.
class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Makes skipped steps name parameters as this module does, instead of by number.
  void name_parameters(const torch::nn::Module& module);

  torch::Tensor scale(const torch::Tensor& loss);

  /// Divides this optimizer's gradients by the scale, for clipping by hand.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales the gradients unless unscale_() did, and updates the weights unless a gradient is not
  /// finite. `extras` need one of lockstep's optimizers. On a GPU these decide on the device; a
  /// torch::optim optimizer makes the host wait, as in PyTorch. Returns the norm of the unscaled
  /// gradients before clipping, a double scalar; undefined without max_norm, or if the host knows
  /// that the step was skipped.
  torch::Tensor step(torch::optim::Optimizer& optimizer, const StepExtras& extras = {});

  /// Grows, shrinks or sets the scale. Call it once after all optimizers have stepped.
  void update(std::optional<double> new_scale = std::nullopt);

  bool is_enabled() const;

  /// Whether this process has an enabled scaler, so that gradients are expected to overflow at
  /// times.
  static bool any_enabled();

  /// Both wait for the work on the thread's current stream.
  double get_scale() const;
  std::vector<SkippedStep> skipped_steps() const;

  /// Empty if disabled. Save it after update().
  std::optional<GradScalerState> state_dict() const;
  void load_state_dict(const GradScalerState& state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
