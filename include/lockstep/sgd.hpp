#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

class GpuSlots;
class StepItems;

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  /// Of the module whose parameters these are: they are updated in float32 and rounded.
  std::optional<MasterWeights> masters = {};
};

/// torch::optim::SGD whose update is one pass over memory. Everything else is inherited: groups,
/// schedulers, and a state that either optimizer can save and the other load. Weights are float32
/// or float64, with MasterWeights or on a GPU half types too; what it cannot do is an Error that
/// names torch::optim. A parameter that is listed twice, as parameters() lists a shared one, is
/// updated once.
class Sgd final : public torch::optim::SGD, public FusedOptimizer {
 public:
  explicit Sgd(std::vector<torch::Tensor> parameters, const SgdOptions& options = {});
  Sgd(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  torch::Tensor step(const StepExtras& extras);  ///< returns what step_fused() does
  torch::Tensor step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;
  bool has_master(const torch::Tensor& parameter) const override;

  /// Gradients are dropped, which costs nothing; false: filled with zeros.
  void zero_grad(bool set_to_none = true);

  /// Master weights are part of it: training goes on with the same bits.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  torch::Tensor step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                            const StepExtras& extras);
  torch::Tensor step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                             const StepExtras& extras);

  std::optional<MasterWeights> masters_;
  std::shared_ptr<GpuSlots> slots_;  // made by the first step on a GPU
};

}  // namespace lockstep
