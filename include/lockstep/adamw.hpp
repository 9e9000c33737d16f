#pragma once

#include <torch/optim/adamw.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "lockstep/master_weights.hpp"

namespace lockstep {

class GpuSlots;
class StepItems;

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;

  /// Of the module whose parameters these are: they are updated in float32 and rounded.
  std::optional<MasterWeights> masters = {};
};

/// torch::optim::AdamW whose update is one pass over memory. Everything else is inherited: groups,
/// schedulers, and a state that either optimizer can save and the other load. Weights are float32
/// or float64, with MasterWeights or on a GPU half types too; what it cannot do is an Error that
/// names torch::optim. A parameter that is listed twice, as parameters() lists a shared one, is
/// updated once.
class AdamW final : public torch::optim::AdamW, public FusedOptimizer {
 public:
  explicit AdamW(std::vector<torch::Tensor> parameters, const AdamWOptions& options = {});
  AdamW(std::vector<torch::optim::OptimizerParamGroup> groups, const AdamWOptions& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  void step(const StepExtras& extras);
  void step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;
  bool has_master(const torch::Tensor& parameter) const override;

  /// Gradients are dropped, which costs nothing; false: filled with zeros.
  void zero_grad(bool set_to_none = true);

  /// On a GPU steps are counted there, and state() learns their number here: save() waits for it.
  /// Master weights are part of what is saved: training goes on with the same bits.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                   const StepExtras& extras);
  void step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                    const StepExtras& extras);
  void store_gpu_steps() const;

  std::optional<MasterWeights> masters_;
  std::shared_ptr<GpuSlots> slots_;  // made by the first step on a GPU
};

}  // namespace lockstep
