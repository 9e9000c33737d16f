#pragma once

#include <torch/optim/sgd.h>

#include <vector>

#include "lockstep/fused_step.hpp"

namespace lockstep {

class StepItems;

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// torch::optim::SGD whose update is one pass over memory. Everything else is inherited: groups,
/// schedulers, and a state that either optimizer can save and the other load. Weights are float32
/// or float64, on a GPU half types too; what it cannot do is an Error that names torch::optim.
/// A parameter that is listed twice, as parameters() lists a shared one, is updated once.
class Sgd final : public torch::optim::SGD, public FusedOptimizer {
 public:
  explicit Sgd(std::vector<torch::Tensor> parameters, const SgdOptions& options = {});
  Sgd(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& defaults);

  torch::Tensor step(LossClosure closure = nullptr) override;
  void step(const StepExtras& extras);
  void step_fused(const ScaledGradients& gradients, const StepExtras& extras) override;

  /// Gradients are dropped, which costs nothing; false: filled with zeros.
  void zero_grad(bool set_to_none = true);

 private:
  void step_on_cpu(const StepItems& items, const ScaledGradients& gradients,
                   const StepExtras& extras);
  void step_on_cuda(const StepItems& items, const ScaledGradients& gradients,
                    const StepExtras& extras);
};

}  // namespace lockstep
