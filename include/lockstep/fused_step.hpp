#pragma once

#include <torch/types.h>

#include <optional>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// What rides along with one update of the weights.
struct StepExtras {
  /// Gradients are scaled down to this norm where they are longer. Where the model is divided over
  /// ranks (tensor parallel layers, a Pipeline over ranks), the norm is that of the whole model and
  /// the step is collective over them.
  std::optional<double> max_norm = {};

  bool zero_grad = false;  ///< gradients are gone afterwards

  /// Ranks that hold other parts of the model, where lockstep did not divide it itself.
  std::optional<Communicator> model_parallel = {};
};

/// Gradients as a GradScaler hands them to an optimizer.
struct ScaledGradients {
  /// Still to be multiplied in; 1 where they are unscaled already.
  double inverse_scale = 1;

  /// The same as a number that only a GPU knows: a float scalar there, to be divided by.
  /// Undefined: inverse_scale holds.
  torch::Tensor scale = {};

  /// Of all gradients of the model as they are now, a double scalar on their device; undefined
  /// where it is not known.
  torch::Tensor sum_of_squares = {};

  /// A float scalar on their device, 0 or 1: where it is 1, nothing may change. Undefined: all
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

  /// Whether this parameter is a rounded copy of a float32 weight (MasterWeights): its gradients
  /// are multiplied in float32 then.
  virtual bool has_master(const torch::Tensor& parameter) const = 0;
};

}  // namespace lockstep
