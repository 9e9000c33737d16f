#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <string_view>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "torch_compat.hpp"

namespace lockstep {

/// A parameter that has a gradient.
struct StepItem {
  torch::Tensor weight;
  torch::Tensor gradient;  ///< in the weight's memory order: its own memory, or a copy
  bool is_copy = false;
  size_t group = 0;
};

/// Items of one group on one GPU, of one dtype.
struct CudaBatch {
  size_t group = 0;
  std::vector<size_t> items;
};

/// Throws unless a fused optimizer (of this name, "AdamW") can update all parameters.
void check_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      std::string_view optimizer);

/// What one step updates: the parameters with gradients, checked before anything changes.
class StepItems {
 public:
  StepItems(const std::vector<torch::optim::OptimizerParamGroup>& groups,
            std::string_view optimizer);

  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  const StepItem& operator[](size_t item) const { return items_[item]; }
  std::vector<torch::Tensor> weights() const;

  bool on_cuda() const { return items_[0].weight.is_cuda(); }

  /// On the CPU: what gradients are multiplied by, for their scale and for max_norm.
  double gradient_factor(const ScaledGradients& scaled, const StepExtras& extras) const;

  /// On GPUs: the same as a divisor, computed there; undefined where it is 1.
  torch::Tensor gradient_divisor(const ScaledGradients& scaled, const StepExtras& extras) const;

  std::vector<CudaBatch> cuda_batches() const;

  /// The tensors of a batch, and its scaling on the batch's own GPU.
  std::vector<torch::Tensor> weights(const CudaBatch& batch) const;
  std::vector<torch::Tensor> gradients(const CudaBatch& batch) const;
  compat::FusedScaling scaling(const CudaBatch& batch, const torch::Tensor& divisor,
                               const torch::Tensor& found_inf) const;

  /// After the update: tells autograd of the change; gradients are dropped, or copies of them that
  /// were changed are written back.
  void finish(bool gradients_changed, const StepExtras& extras) const;

 private:
  std::vector<torch::Tensor> gradients() const;

  std::vector<StepItem> items_;
};

}  // namespace lockstep
