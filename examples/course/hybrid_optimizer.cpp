#include "course/hybrid_optimizer.hpp"

#include <torch/torch.h>

#include "course/setup.hpp"

namespace course {

HybridOptimizer::HybridOptimizer(lockstep::Pipeline& pipeline, lockstep::GradScaler& scaler,
                                 const Options& options)
    : pipeline_(pipeline), scaler_(scaler) {
  if (scaler.is_enabled()) {
    whole_ = make_optimizer(pipeline.parameters(), options);
    return;
  }
  of_stage_.resize(pipeline.schedule().place_of_stage.size());
  pipeline.for_each_stage("make optimizer", [&](int stage) {
    const auto parameters = pipeline.stage(stage)->parameters();
    if (parameters.empty()) return;  // a stage of activations only
    of_stage_[static_cast<size_t>(stage)] = make_optimizer(parameters, options);
  });
}

void HybridOptimizer::step() {
  if (whole_) {
    scaler_.step(*whole_);
    scaler_.update();
  } else {
    pipeline_.for_each_stage("optimizer", [&](int stage) {
      const auto& optimizer = of_stage_[static_cast<size_t>(stage)];
      if (optimizer) optimizer->step();
    });
  }
  for (const int stage : pipeline_.local_stages()) {
    auto module = pipeline_.stage(stage);
    module->zero_grad(/*set_to_none=*/true);
  }
}

}  // namespace course
