#pragma once

#include <optional>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"
#include "parallel/accumulation_window.hpp"
#include "parallel/bucket_flight.hpp"
#include "parallel/gradient_buckets.hpp"

namespace lockstep {

/// Averages one stage's gradients over the data axis, once a step. They lie in buckets all the
/// time, as DistributedDataParallel's do.
class StageSync {
 public:
  /// Collective. Rank 0's weights and buffers go to all. `comm` is used by the stage's thread only.
  StageSync(int stage, torch::nn::Sequential module, const Communicator& comm,
            int64_t bucket_cap_bytes);

  /// A step begins: every parameter has its place in a bucket as its gradient. Where buffers are
  /// shared: collective.
  void begin_step(bool share_buffers);

  /// The stage's last backward of the step has ended. Nothing is sent where the step is only one of
  /// several whose gradients add up.
  void launch(bool synchronise, double weight);

  /// Finishes what needs no waiting.
  void advance() { flight_.advance(); }

  /// Finishes all.
  void finish();

  /// What was done in this step, if anything was. Waits for the GPU.
  std::optional<SyncSpan> span();

  void abort(const std::string& reason);

 private:
  void require_averaged() const;

  int stage_;
  torch::nn::Sequential module_;
  const Communicator comm_;
  std::vector<TrainedParameter> parameters_;
  std::optional<GradientBuckets> buckets_;  // none where nothing is trained or nobody else is there
  DdpStats stats_;
  BucketFlight flight_;
  AccumulationWindow window_;
  std::optional<SyncSpan> span_;  // of this step; its times come from the flight
};

}  // namespace lockstep
