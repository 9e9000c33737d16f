#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/fused_optimizer.hpp"
#include "precision/loss_scale.hpp"

namespace lockstep {

/// The position of a parameter in its optimizer.
struct ParameterPosition {
  size_t group = 0;
  size_t index = 0;
  const c10::TensorImpl* parameter = nullptr;  ///< only compared, never used

  auto operator<=>(const ParameterPosition&) const = default;
};

/// Names of parameters: those of a module, or their numbers. A position keeps its id, so that a GPU
/// can name a parameter in every replay of a captured step.
class ParameterNames {
 public:
  void learn(const torch::nn::Module& module);
  int32_t id_of(const ParameterPosition& position);
  std::string of(int32_t id) const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
  std::map<ParameterPosition, int32_t> ids_;
  std::vector<ParameterPosition> positions_;  // [id]
};

/// The gradients that an optimizer would update its weights with.
struct OptimizerGradients {
  /// None is empty. Sparse gradients are here by their values, complex ones by both parts.
  std::vector<torch::Tensor> gradients;
  std::vector<int32_t> ids;               ///< [gradient]: id of its parameter
  std::vector<torch::Tensor> parameters;  ///< [gradient]

  void add(const OptimizerGradients& from, size_t i);
  bool all_on_cpu() const;
  bool all_on_one_gpu() const;
};

/// Collects the gradients. Refuses those in fp16, which would underflow when they are unscaled,
/// unless `fused` is about to update with them and multiplies them in float32 for their masters.
OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer, ParameterNames& names,
                                const FusedOptimizer* fused);

/// What is known of one optimizer's gradients since the last update().
struct Finding {
  int32_t first = -1;         ///< id of one that is not finite; -1: the host knows of none
  int overflowed_peer = -1;   ///< another model-parallel rank where a gradient is not finite
  double sum_of_squares = 0;  ///< of the gradients that the host knows, if it was asked for
  std::vector<GpuScan> on_gpus;

  bool overflowed() const { return first >= 0 || overflowed_peer >= 0; }

  /// Waits until the host knows what the GPUs found.
  void bring_to_host();
};

/// Reads the gradients once, without waiting for GPUs. On these, sums of squares cost extra.
Finding scan(const OptimizerGradients& gradients, bool squares);

/// Multiplies gradients by the inverse scale in place and finds those that were not finite before.
/// Does not wait for GPUs if the scale is on one.
Finding unscale_in_place(const OptimizerGradients& gradients, const LossScale& scale);

}  // namespace lockstep
