#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/streams.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/schedule.hpp"
#include "pipeline/channel.hpp"
#include "pipeline/stage.hpp"
#include "pipeline/stage_sync.hpp"
#include "pipeline/step_plan.hpp"

namespace lockstep {

struct LocalStage {
  Stage stage;
  std::unique_ptr<StageSync> sync;  ///< none without a data axis
};

/// What every rank of a pipeline knows of it.
struct PipelineFacts {
  const Schedule& schedule;
  const std::vector<std::string>& rank_names;  ///< [pipeline rank] in messages
  int world_rank;                              ///< of this process
  int part_threads = 0;                        ///< compute virtual shards; 0: there are none
};

/// One logical device or process of a pipeline: runs its list of actions strictly in order.
class PipelineRank {
 public:
  PipelineRank(int index, const PipelineFacts& pipeline, Device& device,
               std::unique_ptr<StageChannel> channel)
      : index_(index), pipeline_(pipeline), device_(device), channel_(std::move(channel)) {}

  /// Before the first step.
  void add(std::unique_ptr<LocalStage> stage) { stages_.push_back(std::move(stage)); }

  int index() const { return index_; }
  Device& device() const { return device_; }
  const StageChannel& channel() const { return *channel_; }
  const std::vector<std::unique_ptr<LocalStage>>& stages() const { return stages_; }

  /// Called on a thread that works for the device. kStageFailed names the action in which a module
  /// threw.
  void run(const StepPlan& plan);

  /// Runs the forwards only. Returns the last stage's outputs if it is here.
  std::vector<torch::Tensor> evaluate(const StepPlan& plan);

  /// Releases all who wait for this rank and drops what it holds of the step.
  void give_up(const std::string& reason);

  /// The batch's loss in the last run, if the last stage is here.
  const torch::Tensor& loss() const { return loss_; }
  /// The loss of each micro-batch, as the loss function returned it.
  const std::vector<torch::Tensor>& losses() const { return losses_; }
  /// The comparison of two micro-batches' losses in the last step, if the plan asked for one and
  /// the last stage is here.
  std::optional<LossComparison> take_comparison() {
    return stages_.back()->stage.take_comparison();
  }
  /// The gradient of each micro-batch of x in the last run, if x requires one and stage 0 is here;
  /// empty otherwise.
  std::vector<torch::Tensor> take_input_gradients() { return std::move(input_gradients_); }
  /// The point its device had reached when work for it ended.
  const StreamOrder& end() const { return end_; }
  void mark_end() { end_ = StreamOrder::now(device_); }
  void add_spans(StepTrace& trace) const;

 private:
  struct Timed {
    Action action;
    DeviceEvent begin;
    DeviceEvent end;
  };

  LocalStage& at(int stage);
  bool is_last(int stage) const { return stage + 1 == pipeline_.schedule.stages(); }
  const std::vector<Action>& actions() const {
    return pipeline_.schedule.actions[static_cast<size_t>(index_)];
  }
  void run_action(const Action& action, const StepPlan& plan);
  torch::Tensor input_of(const Action& action, const StepPlan& plan);
  torch::Tensor rows_here(const torch::Tensor& batch, const StepPlan& plan, int micro_batch) const;
  MicroBatchFacts facts_of(const Action& action, const StepPlan& plan);
  torch::Tensor compute(const Action& action, const StepPlan& plan, const torch::Tensor& input);
  void pass_on(const Action& action, const StepPlan& plan, const torch::Tensor& result);
  void end_backward(const Action& action, const StepPlan& plan);
  // Runs what a module does in an action; its errors become kStageFailed.
  template <class Work>
  torch::Tensor attempt(const Action& action, const torch::Tensor& input, const Work& work) const;
  [[noreturn]] void fail(const Action& action, const torch::Tensor& input,
                         const std::exception& error) const;

  int index_;
  const PipelineFacts pipeline_;
  Device& device_;
  std::unique_ptr<StageChannel> channel_;
  std::vector<std::unique_ptr<LocalStage>> stages_;

  // The actions of the last run.
  std::vector<Timed> timed_;
  std::vector<int> backwards_left_;  // [stage] until its gradients are complete
  torch::Tensor loss_;
  std::vector<torch::Tensor> losses_;           // [micro-batch]
  std::vector<torch::Tensor> input_gradients_;  // [micro-batch]
  StreamOrder end_;
};

}  // namespace lockstep
