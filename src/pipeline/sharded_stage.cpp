
#include <algorithm>

#include "gradients/model_sync.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "pipeline/stage_sync.hpp"
#include "pipeline/step_plan.hpp"

namespace lockstep {
namespace {

// The options of one stage: of the units, those that are in it.
ShardOptions options_of_stage(const torch::nn::Sequential& module, const PipelineOptions& options) {
  ShardOptions chosen = *options.shard;
  const auto parameters = module->named_parameters();
  std::erase_if(chosen.units, [&](const std::string& unit) {
    return std::none_of(parameters.begin(), parameters.end(),
                        [&](const auto& item) { return item.key().starts_with(unit + "."); });
  });
  chosen.broadcast_buffers = false;  // the pipeline does it, before a step
  chosen.prefetch = false;           // a unit is released when an action ends
  return chosen;
}

class ShardedStage final : public StageSync {
 public:
  ShardedStage(int stage, const torch::nn::Sequential& module, const Communicator& comm,
               const PipelineOptions& options)
      : stage_(stage),
        comm_(comm),
        model_(std::make_unique<ShardedModel>(module.ptr(), comm,
                                              options_of_stage(module, options))) {}

  void begin_step(const StepPlan& plan) override {
    span_.reset();
    model_->begin_step(plan.share_buffers);
  }

  void end_action() override { model_->end_action(); }

  void launch(bool synchronise, double weight) override {
    averages_ = synchronise;
    if (!averages_) return model_->end_step();
    const ShardStats before = model_->stats();
    span_.emplace(SyncSpan{.stage = stage_, .begin_ns = monotonic_ns()});
    model_->set_weight(weight);
    model_->begin_average();
    const ShardStats after = model_->stats();
    span_->all_reduces = after.reduce_scatters - before.reduce_scatters;
    span_->bytes = after.reduced_bytes - before.reduced_bytes;
  }

  void finish() override {
    if (!averages_) return;
    model_->end_average();
    span_->end_ns = monotonic_ns();
  }

  void begin_evaluation() override { model_->begin_evaluation(); }
  void end_evaluation() override { model_->end_evaluation(); }
  void call_mismatch() const override { lockstep::call_mismatch(comm_); }
  int64_t unaveraged_steps() const override { return 0; }  // the model tells it when it ends
  std::optional<SyncSpan> span() override { return span_; }

  void abort(const std::string& reason) override {
    span_.reset();
    comm_.abort(reason);
  }

  std::vector<torch::Tensor> parameters() const override {
    std::vector<torch::Tensor> shards;
    for (const auto& each : trained_in(*model_->module())) {
      shards.push_back(model_->shard_of(each.tensor));
    }
    return shards;
  }

  ShardedModel* sharded() const override { return model_.get(); }

 private:
  int stage_;
  Communicator comm_;
  std::unique_ptr<ShardedModel> model_;
  bool averages_ = false;         // in this step
  std::optional<SyncSpan> span_;  // of this step
};

}  // namespace

std::unique_ptr<StageSync> make_sharded_stage(int stage, const torch::nn::Sequential& module,
                                              const Communicator& comm,
                                              const PipelineOptions& options) {
  return std::make_unique<ShardedStage>(stage, module, comm, options);
}

}  // namespace lockstep
