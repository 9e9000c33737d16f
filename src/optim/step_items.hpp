#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "lockstep/master_weights.hpp"
#include "torch_compat.hpp"

namespace lockstep {

/// A parameter that has a gradient.
struct StepItem {
  torch::Tensor parameter;
  torch::Tensor weight;    ///< what is updated: the parameter's master, or itself
  torch::Tensor gradient;  ///< in the weight's memory order: its own memory, or a copy; on the CPU
                           ///< of the weight's dtype
  bool is_copy = false;
  size_t group = 0;

  bool has_master() const { return !weight.is_same(parameter); }
};

/// Throws unless a fused optimizer (of this name, "AdamW") can update all parameters.
void check_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      const std::optional<MasterWeights>& masters, std::string_view optimizer);

/// Refuses a max_norm that no gradient can have.
void check_extras(const StepExtras& extras);

/// On the CPU: the norm of the unscaled gradients; undefined where extras ask for none.
torch::Tensor gradient_norm(const ScaledGradients& scaled, const StepExtras& extras);

/// On the CPU: what gradients are multiplied by, for their scale and for max_norm.
double gradient_factor(const ScaledGradients& scaled, const StepExtras& extras,
                       const torch::Tensor& norm);

/// What one step updates: the parameters with gradients, checked before anything changes.
class StepItems {
 public:
  StepItems(const std::vector<torch::optim::OptimizerParamGroup>& groups,
            const std::optional<MasterWeights>& masters, std::string_view optimizer);

  bool empty() const { return items_.empty(); }
  size_t size() const { return items_.size(); }
  const StepItem& operator[](size_t item) const { return items_[item]; }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

  bool on_cuda() const { return items_[0].weight.is_cuda(); }

  /// The same with the sum of squares of the whole model's gradients, where extras ask for a norm
  /// and nobody has found it yet. Collective over the ranks that hold parts of the model, also on
  /// one without gradients.
  ScaledGradients with_squares(const ScaledGradients& scaled,
                               const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               const StepExtras& extras) const;

  /// On the CPU: parameters become their masters, rounded.
  void round_masters() const;

  /// After the update: tells autograd of the change; gradients are dropped, or copies of them that
  /// were changed are written back.
  void finish(bool gradients_changed, const StepExtras& extras) const;

 private:
  std::optional<MasterWeights> masters_;
  std::vector<StepItem> items_;
};

}  // namespace lockstep
