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
#include "lockstep/fused_step.hpp"

namespace lockstep {

/// An update that was not made because a gradient was infinite or not a number.
struct SkippedStep {
  int64_t step = 0;       ///< counts update() from 1
  std::string parameter;  ///< the first whose gradient overflowed
  double scale_before = 0;
  double scale_after = 0;
};

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  ///< finite steps in a row before the scale grows
  bool enabled = true;             ///< false: every call passes through, the scale is 1

  /// Ranks that hold parts of one model: they skip a step together. Data-parallel ranks need
  /// nothing: their averaged gradients overflow together. Neither do tensor parallel layers and
  /// stages of a Pipeline over ranks, which are known, unless a rank of them has no gradient at
  /// all.
  std::optional<Communicator> model_parallel = {};

  /// Told of every skipped step. On a GPU it may come some steps late: nobody waits for the device.
  std::function<void(const SkippedStep&)> on_skip = {};
};

/// What makes two scalers continue alike; the fields of PyTorch's state_dict.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;
};

/// Multiplies losses so that small gradients survive fp16, and skips updates that overflowed.
/// torch.amp.GradScaler's rules, on CPU and CUDA:
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);   // unscales; updates unless a gradient is not finite
///     scaler.update();          // adapts the scale
///
/// For each optimizer and update():  ready -> unscaled -> stepped. Any other order is an Error.
class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Skipped steps name parameters as this module does; otherwise by their number.
  void name_parameters(const torch::nn::Module& module);

  torch::Tensor scale(const torch::Tensor& loss);

  /// Divides the gradients of this optimizer's parameters by the scale, for clipping by hand.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales where unscale_ did not, and updates the weights unless a gradient is not finite.
  /// `extras` need an optimizer of lockstep. A lockstep optimizer on a GPU decides there; a
  /// torch::optim optimizer makes the host wait, as in PyTorch. Returns the norm of the unscaled
  /// gradients before clipping, a double scalar; undefined without max_norm, or where the host
  /// knows that the step was skipped.
  torch::Tensor step(torch::optim::Optimizer& optimizer, const StepExtras& extras = {});

  /// Grows or shrinks the scale, or sets it. Once after all optimizers have stepped.
  void update(std::optional<double> new_scale = std::nullopt);

  bool is_enabled() const;

  /// Whether this process has an enabled scaler: then gradients may overflow as a matter of course.
  static bool any_enabled();

  /// These wait for what the thread's current stream holds.
  double get_scale() const;
  std::vector<SkippedStep> skipped_steps() const;

  /// Empty where disabled. Save after update().
  std::optional<GradScalerState> state_dict() const;
  void load_state_dict(const GradScalerState& state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
