#pragma once

#include <optional>
#include <vector>

#include "gradients/gradient_buckets.hpp"
#include "gradients/in_flight_buckets.hpp"
#include "gradients/model_sync.hpp"
#include "gradients/nonfinite_gradients.hpp"
#include "gradients/part_gradients.hpp"
#include "gradients/trained_parameters.hpp"
#include "gradients/virtual_shards.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"

namespace lockstep {

/// Averages one stage's gradients over the data axis, once per step. The gradients are always views
/// of buckets, as those of DistributedDataParallel are.
///
/// With virtual shards every micro-batch is a part: its gradients are taken away when its backward
/// has ended, and those of all parts are averaged at the end of the step, in each step.
class StageSync {
 public:
  /// Collective. Rank 0's weights and buffers go to all. Only the stage's thread may use `comm`.
  StageSync(int stage, torch::nn::Sequential module, const Communicator& comm,
            const PipelineOptions& options);

  /// Begins a step: makes every trained parameter's gradient a view of its bucket. Refuses weights
  /// that were updated with gradients that were not averaged, and parameters whose gradients would
  /// not be. Collective if buffers are shared or the set of trained parameters has changed.
  void begin_step(bool share_buffers);

  /// With virtual shards: a micro-batch goes forward, with the buffers that the step began with.
  void begin_forward(int micro_batch);

  /// With virtual shards: takes the gradients of a part whose backward has ended.
  void take_part(int64_t part);

  /// The same after the first half of a backward, which did everything if the stage cannot be
  /// split.
  void take_early(int64_t part);

  /// Whether gradients that are not zero were there before this step.
  bool has_accumulated() const { return parts_ && parts_->has_accumulated(); }

  /// Called when the stage's last backward of the step has ended. Nothing is sent unless
  /// `synchronise`, as in all but the last of several steps whose gradients add up.
  void launch(bool synchronise, double weight);

  /// Calls another collective than the other ranks, as `lockstep run --inject mismatch` asks.
  void call_mismatch() const { lockstep::call_mismatch(comm_); }

  /// Finishes what is possible without waiting.
  void advance() { in_flight_.advance(); }

  /// Waits for all. `sum_of_weights`: of virtual shards.
  void finish(double sum_of_weights);

  /// Steps whose gradients were applied without having been averaged.
  int64_t unaveraged_steps() const {
    return checks_updates_ && window_.weights_changed() ? window_.micro_steps() : 0;
  }

  /// What was averaged in this step, if anything. Waits for the GPU.
  std::optional<SyncSpan> span();

  void abort(const std::string& reason);

 private:
  void require_averaged() const;
  void require_unchanged() const;
  void agree_on_frozen();
  void prepare_gradient(size_t parameter);
  void begin_parts(bool share_buffers);
  void average_parts(double sum_of_weights);
  [[noreturn]] void refuse(const std::string& message, const std::string& help) const;

  int stage_;
  torch::nn::Sequential module_;
  const Communicator comm_;
  const bool checks_updates_;
  std::vector<TrainedParameter> parameters_;  // trained when the pipeline was made
  std::vector<ParameterForm> forms_;          // [parameter]
  std::vector<uint8_t> frozen_;               // [parameter] since then
  std::optional<GradientBuckets> buckets_;    // none if nothing is trained or comm has one rank
  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  InFlightBuckets in_flight_;
  AccumulationWindow window_;
  std::optional<PartTree> tree_;  // none without virtual shards, as the next ones
  std::optional<PartGradients> parts_;
  std::optional<PartBuffers> part_buffers_;  // of this step
  int forwards_ = 0;                         // of this step
  bool looked_ = false;                      // at a part of this step
  std::vector<int64_t> taken_early_;         // parts of this step
  std::optional<SyncSpan> span_;             // of this step; its times come from stats_
};

}  // namespace lockstep
