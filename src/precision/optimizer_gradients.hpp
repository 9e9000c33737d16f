#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "precision/loss_scale.hpp"

namespace lockstep {

/// Where a parameter stands in its optimizer.
struct ParameterPlace {
  size_t group = 0;
  size_t index = 0;
  const c10::TensorImpl* parameter = nullptr;  ///< to be compared only
};
using ParameterPlaces = std::shared_ptr<const std::vector<ParameterPlace>>;

/// Names of parameters: a module's, or their number.
class ParameterNames {
 public:
  void learn(const torch::nn::Module& module);
  std::string of(const ParameterPlace& place) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
};

/// What an optimizer would update its weights with.
struct OptimizerGradients {
  /// Not empty. Of sparse ones the values, of complex ones both parts.
  std::vector<torch::Tensor> gradients;
  ParameterPlaces places;  ///< [gradient]
  bool all_on_cpu = true;
};

/// Refuses fp16 gradients: unscaled, they would underflow.
OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer, const ParameterNames& names);

/// What a GPU found in the gradients it holds; nothing of it is on the host.
struct GpuFinding {
  torch::Tensor found_inf;         ///< float scalar: 0, or another number
  torch::Tensor first;             ///< float scalar: index into `gradients`; holds if found_inf
  std::vector<int64_t> gradients;  ///< indices into the optimizer's places
};

/// What is known of one optimizer's gradients since the last update().
struct Finding {
  ParameterPlaces places;
  int64_t first_nonfinite = -1;  ///< index into places; -1: none, as far as the host knows
  int overflowed_peer = -1;      ///< another model-parallel rank where a gradient is not finite
  std::vector<GpuFinding> on_gpus;

  bool overflowed() const { return first_nonfinite >= 0 || overflowed_peer >= 0; }

  /// Waits until the host knows what the GPUs found.
  void bring_to_host();
};

/// Multiplies gradients by the inverse scale in place and looks for what was not finite before. On
/// GPUs nobody waits, if the scale is there too.
Finding unscale_in_place(const OptimizerGradients& gradients, const LossScale& scale);

/// Of all of them; waits for GPUs.
double sum_of_squares(const OptimizerGradients& gradients);

}  // namespace lockstep
