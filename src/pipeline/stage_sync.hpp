#pragma once

#include <optional>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"
#include "parallel/accumulation_window.hpp"
#include "parallel/bucket_flight.hpp"
#include "parallel/gradient_buckets.hpp"
#include "parallel/model_tensors.hpp"
#include "parallel/nonfinite_gradients.hpp"

namespace lockstep {

/// Averages one stage's gradients over the data axis, once a step. They lie in buckets all the
/// time, as DistributedDataParallel's do.
class StageSync {
 public:
  /// Collective. Rank 0's weights and buffers go to all. `comm` is used by the stage's thread only.
  StageSync(int stage, torch::nn::Sequential module, const Communicator& comm,
            const PipelineOptions& options);

  /// A step begins: every parameter that is trained has its place in a bucket as its gradient.
  /// Refuses weights that took gradients nobody averaged, and parameters whose gradients nobody
  /// would. Where buffers are shared, or what is trained has changed: collective.
  void begin_step(bool share_buffers);

  /// The stage's last backward of the step has ended. Nothing is sent where the step is only one of
  /// several whose gradients add up.
  void launch(bool synchronise, double weight);

  /// Finishes what needs no waiting.
  void advance() { flight_.advance(); }

  /// Finishes all.
  void finish();

  /// Steps whose gradients were applied without having been averaged; 0: none.
  int64_t spoiled_steps() const {
    return checks_updates_ && window_.weights_changed() ? window_.micro_steps() : 0;
  }

  /// What was done in this step, if anything was. Waits for the GPU.
  std::optional<SyncSpan> span();

  void abort(const std::string& reason);

 private:
  void require_averaged() const;
  void require_unchanged() const;
  void agree_on_frozen();
  void place_gradient(size_t parameter);
  [[noreturn]] void refuse(const std::string& message, const std::string& help) const;

  int stage_;
  torch::nn::Sequential module_;
  const Communicator comm_;
  const bool checks_updates_;
  std::vector<TrainedParameter> parameters_;  // that were trained when the pipeline was made
  std::vector<ParameterForm> forms_;          // [parameter]
  std::vector<uint8_t> frozen_;               // [parameter] since then
  std::optional<GradientBuckets> buckets_;  // none where nothing is trained or nobody else is there
  DdpStats stats_;
  NonfiniteGradients nonfinite_;
  BucketFlight flight_;
  AccumulationWindow window_;
  std::optional<SyncSpan> span_;  // of this step; its times come from the flight
};

}  // namespace lockstep
