#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

class GpuSlots;
class StepItems;

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient, times the weight

  /// Of the module whose parameters these are: they are updated in float32 and rounded.
  std::optional<MasterWeights> masters = {};
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  ///< taken from the weight itself

  /// Of the module whose parameters these are: they are updated in float32 and rounded.
  std::optional<MasterWeights> masters = {};
};

/// torch::optim::Adam or AdamW whose update is one pass over memory. Everything else is inherited:
/// groups, schedulers, and a state that either optimizer can save and the other load. Weights are
/// float32 or float64, with MasterWeights or on a GPU half types too; what it cannot do is an Error
/// that names torch::optim. A parameter that is listed twice, as parameters() lists a shared one,
/// is updated once.
template <class TorchAdam>
class FusedAdam final : public TorchAdam, public FusedOptimizer {
 public:
  using Options =
      std::conditional_t<std::is_same_v<TorchAdam, torch::optim::Adam>, AdamOptions, AdamWOptions>;
  using LossClosure = torch::optim::Optimizer::LossClosure;

  explicit FusedAdam(std::vector<torch::Tensor> parameters, const Options& options = {});
  FusedAdam(std::vector<torch::optim::OptimizerParamGroup> groups, const Options& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  torch::Tensor step(const StepExtras& extras);  ///< returns what step_fused() does
  torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;
  bool has_master(const torch::Tensor& parameter) const override;

  /// Gradients are dropped, which costs nothing; false: filled with zeros.
  void zero_grad(bool set_to_none = true);

  /// On a GPU steps are counted there, and state() learns their number here: save() waits for it.
  /// Master weights are part of what is saved: training goes on with the same bits.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  torch::Tensor step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                            const StepExtras& extras);
  torch::Tensor step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                             const StepExtras& extras);
  void store_gpu_steps() const;

  std::optional<MasterWeights> masters_;
  std::shared_ptr<GpuSlots> slots_;  // made by the first step on a GPU
};

extern template class FusedAdam<torch::optim::Adam>;
extern template class FusedAdam<torch::optim::AdamW>;

/// Adam with its weight decay in the gradient, and AdamW with it beside the update.
using Adam = FusedAdam<torch::optim::Adam>;
using AdamW = FusedAdam<torch::optim::AdamW>;

}  // namespace lockstep
