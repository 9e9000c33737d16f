#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "course/options.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/pipeline.hpp"

namespace course {

/// --optimizer for a model in stages: one for each stage, on its device, all at once. A scaler that
/// is enabled judges the gradients of all stages together, so that they skip a step together: then
/// there is one optimizer for all.
class HybridOptimizer {
 public:
  HybridOptimizer(lockstep::Pipeline& pipeline, lockstep::GradScaler& scaler,
                  const Options& options);

  /// Updates the weights, then drops the gradients.
  void step();

 private:
  lockstep::Pipeline& pipeline_;
  lockstep::GradScaler& scaler_;
  std::unique_ptr<torch::optim::Optimizer> whole_;                  // with a scaler
  std::vector<std::unique_ptr<torch::optim::Optimizer>> of_stage_;  // [stage]; null: not local
};

}  // namespace course
