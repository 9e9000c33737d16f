#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "precision/loss_scale.hpp"

namespace lockstep {

/// Where a parameter stands in its optimizer.
struct ParameterPlace {
  size_t group = 0;
  size_t index = 0;
  const c10::TensorImpl* parameter = nullptr;  ///< to be compared only

  auto operator<=>(const ParameterPlace&) const = default;
};

/// Names of parameters: a module's, or their number. A place keeps its id, so that a GPU can say
/// which one it means in every replay of a captured step.
class ParameterNames {
 public:
  void learn(const torch::nn::Module& module);
  int32_t id_of(const ParameterPlace& place);
  std::string of(int32_t id) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
  std::map<ParameterPlace, int32_t> ids_;
  std::vector<ParameterPlace> places_;  // [id]
};

/// What an optimizer would update its weights with.
struct OptimizerGradients {
  /// Not empty. Of sparse ones the values, of complex ones both parts.
  std::vector<torch::Tensor> gradients;
  std::vector<int32_t> ids;               ///< [gradient] of its parameter
  std::vector<torch::Tensor> parameters;  ///< [gradient]

  void add(const OptimizerGradients& from, size_t i);
  bool all_on_cpu() const;
  bool all_on_one_gpu() const;
};

/// Refuses fp16 gradients: unscaled, they would underflow. `fused`: is about to update with them;
/// those it has masters for it multiplies in float32.
OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer, ParameterNames& names,
                                const FusedOptimizer* fused);

/// What is known of one optimizer's gradients since the last update().
struct Finding {
  int32_t first = -1;         ///< id of one that is not finite; -1: none, as far as the host knows
  int overflowed_peer = -1;   ///< another model-parallel rank where a gradient is not finite
  double sum_of_squares = 0;  ///< of a scan that was asked for it, as far as the host knows
  std::vector<GpuScan> on_gpus;

  bool overflowed() const { return first >= 0 || overflowed_peer >= 0; }

  /// Waits until the host knows what the GPUs found.
  void bring_to_host();
};

/// Reads them once. On GPUs nobody waits, and sums cost extra.
Finding scan(const OptimizerGradients& gradients, bool squares);

/// Multiplies gradients by the inverse scale in place and looks for what was not finite before. On
/// GPUs nobody waits, if the scale is there too.
Finding unscale_in_place(const OptimizerGradients& gradients, const LossScale& scale);

}  // namespace lockstep
