#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "device/stream_order.hpp"
#include "lockstep/moment.hpp"
#include "lockstep/schedule.hpp"
#include "pipeline/stage.hpp"
#include "pipeline/stage_sync.hpp"
#include "pipeline/wire.hpp"

namespace lockstep {

/// What all places must know of a step.
struct StepPlan {
  torch::Tensor x;                  ///< undefined on ranks without stage 0
  torch::Tensor y;                  ///< undefined on ranks without the last stage
  std::vector<int64_t> rows;        ///< [micro-batch]
  std::vector<double> loss_shares;  ///< [micro-batch] of the batch's loss, where the last stage is
  double loss_factor = 1;           ///< of what goes backward, beside the share
  double data_factor = 1;           ///< likewise: see Note [Weights of accumulated gradients]
  torch::Tensor loss_scale;         ///< likewise; undefined: 1
  uint64_t seed = 0;
  bool synchronise = true;
  bool share_buffers = true;
  double weight = 1;  ///< of this rank on the data axis

  bool has_loss(int micro_batch) const { return loss_shares[static_cast<size_t>(micro_batch)] > 0; }

  /// The rows of a micro-batch, a view of the batch's.
  torch::Tensor rows_of(const torch::Tensor& batch, size_t micro_batch) const;
};

/// A stage as a place has it.
struct PlacedStage {
  Stage stage;
  std::optional<StageSync> sync;  ///< none without a data axis
};

/// One logical device or rank of a pipeline: does its list of actions, strictly in order.
class Place {
 public:
  Place(int index, const Schedule& schedule, Device& device, int rank);

  /// Before the first step; `wire` outlives the place.
  void add(std::unique_ptr<PlacedStage> stage) { stages_.push_back(std::move(stage)); }
  void connect(Wire& wire) { wire_ = &wire; }

  int index() const { return index_; }
  Device& device() const { return device_; }
  const std::vector<std::unique_ptr<PlacedStage>>& stages() const { return stages_; }

  /// On a thread that works for the device. kStageFailed names what a module threw in.
  void run(const StepPlan& plan);

  /// Forwards only; gives the last stage's outputs, where it is here.
  std::vector<torch::Tensor> evaluate(const StepPlan& plan);

  /// Nobody shall wait for this place any more; what it holds of the step is dropped.
  void give_up(const std::string& reason);

  /// Of the last run: the batch's loss, where the last stage is here.
  const torch::Tensor& loss() const { return loss_; }
  /// The same of each micro-batch, as the loss function gave it.
  const std::vector<torch::Tensor>& losses() const { return losses_; }
  /// Of the last run: the gradient of each micro-batch of x, where x requires one and stage 0 is
  /// here; empty otherwise.
  std::vector<torch::Tensor> take_input_gradients() { return std::move(input_gradients_); }
  /// The point its device had reached when work for it ended.
  const StreamOrder& end() const { return end_; }
  void mark_end() { end_ = StreamOrder::now(device_); }
  void add_spans(StepTrace& trace) const;

 private:
  struct Timed {
    Action action;
    Moment begin;
    Moment end;
  };

  PlacedStage& at(int stage);
  bool is_last(int stage) const { return stage + 1 == schedule_.stages(); }
  void do_action(const Action& action, const StepPlan& plan);
  torch::Tensor input_of(const Action& action, const StepPlan& plan);
  torch::Tensor rows_here(const torch::Tensor& batch, const StepPlan& plan, int micro_batch) const;
  MicroBatchFacts facts_of(const Action& action, const StepPlan& plan);
  torch::Tensor compute(const Action& action, const StepPlan& plan, const torch::Tensor& input);
  void pass_on(const Action& action, const StepPlan& plan, const torch::Tensor& result);
  void advance_syncs();
  // Runs what a module does in an action; its errors become kStageFailed.
  template <class Work>
  torch::Tensor attempt(const Action& action, const torch::Tensor& input, const Work& work) const;
  [[noreturn]] void fail(const Action& action, const torch::Tensor& input,
                         const std::exception& error) const;

  int index_;
  const Schedule& schedule_;
  Device& device_;
  int rank_;
  Wire* wire_ = nullptr;
  std::vector<std::unique_ptr<PlacedStage>> stages_;

  // Of the last run.
  std::vector<Timed> timed_;
  std::vector<int> backwards_left_;  // [stage] until its gradients are complete
  torch::Tensor loss_;
  std::vector<torch::Tensor> losses_;           // [micro-batch]
  std::vector<torch::Tensor> input_gradients_;  // [micro-batch]
  StreamOrder end_;
};

}  // namespace lockstep
