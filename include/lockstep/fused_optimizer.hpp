#pragma once

#include <torch/types.h>

#include <optional>

#include "lockstep/communicator.hpp"

// What a GradScaler needs of an optimizer. optim.hpp has the optimizers.

namespace lockstep {

/// What a step does in addition to updating the weights.
struct StepExtras {
  /// Gradients whose norm is larger are scaled down to this norm. Where the model is divided over
  /// ranks (tensor parallel layers, a Pipeline over ranks), the norm is that of the whole model,
  /// and the step is collective over those ranks.
  std::optional<double> max_norm = {};

  bool zero_grad = false;  ///< drops the gradients afterwards

  /// Ranks that hold other parts of the model, where lockstep did not divide it itself.
  std::optional<Communicator> model_parallel = {};
};

/// Gradients as a GradScaler hands them to an optimizer.
struct ScaledGradients {
  /// Factor that the gradients must still be multiplied by; 1 if they are already unscaled.
  double inverse_scale = 1;

  /// The scale where only a GPU knows it: a float scalar to divide by. Undefined: inverse_scale is
  /// used.
  torch::Tensor scale = {};

  /// The sum of squares of all gradients of the model as they are now: a double scalar on their
  /// device, or undefined if unknown.
  torch::Tensor sum_of_squares = {};

  /// A float scalar on the gradients' device: where it is not 0, nothing may change. Undefined: all
  /// gradients are finite. On a GPU the optimizer does not read it on the host.
  torch::Tensor found_inf = {};
};

/// An optimizer that unscales, clips and clears gradients while it updates the weights.
class FusedOptimizer {
 public:
  virtual ~FusedOptimizer() = default;

  /// Returns the norm of the unscaled gradients before clipping, a double scalar on their device;
  /// undefined without max_norm.
  virtual torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) = 0;

  /// Whether this parameter is a rounded copy of a float32 weight (MasterWeights). Its gradients
  /// are then multiplied in float32.
  virtual bool has_master(const torch::Tensor& parameter) const = 0;

  /// Brings what only GPUs know, such as how many steps they did, into state(). Waits for them.
  virtual void collect_state() const = 0;

  /// Call it after writing state(): the next step continues from there.
  virtual void note_loaded_state() = 0;
};

}  // namespace lockstep
