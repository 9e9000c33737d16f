#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"

namespace lockstep {

struct StepPlan;

/// Keeps one stage the same on all ranks of the data axis: averages its gradients once per step.
/// Only the stage's thread may use it and its communicator.
class StageSync {
 public:
  virtual ~StageSync() = default;

  /// Begins a step. Refuses weights that were updated with gradients that were not averaged, and
  /// parameters whose gradients would not be. Collective if buffers are shared, gradients
  /// accumulate, or the set of trained parameters has changed.
  virtual void begin_step(const StepPlan& plan) = 0;

  /// Called before each forward of a micro-batch, and before it is computed again for backward.
  virtual void begin_forward() {}

  /// Called when the forward of a micro-batch has ended.
  virtual void end_forward(int /*micro_batch*/) {}

  /// Called when a backward of a micro-batch has ended; `weights_follow`: the first half of one.
  virtual void end_backward(int /*micro_batch*/, bool /*weights_follow*/) {}

  /// With virtual shards: whether gradients that are not zero are there before a step.
  virtual bool has_accumulated() const { return false; }

  /// Called when an action of the stage has ended, also one of an evaluation.
  virtual void end_action() {}

  /// Called when the stage's last backward of the step has ended. Nothing is sent unless
  /// `synchronise`, as in all but the last of several steps whose gradients add up.
  virtual void launch(bool synchronise, double weight) = 0;

  /// Finishes what is possible without waiting.
  virtual void advance() {}

  /// Waits for all.
  virtual void finish() = 0;

  /// Called before and after forwards without gradients.
  virtual void begin_evaluation() {}
  virtual void end_evaluation() {}

  /// Calls another collective than the other ranks, as `lockstep run --inject mismatch` asks.
  virtual void call_mismatch() const = 0;

  /// Steps whose gradients were applied without having been averaged.
  virtual int64_t unaveraged_steps() const = 0;

  /// What was averaged in this step, if anything. Waits for the GPU.
  virtual std::optional<SyncSpan> span() = 0;

  virtual void abort(const std::string& reason) = 0;

  /// What an optimizer updates: the stage's trained parameters, or this rank's shards of them.
  virtual std::vector<torch::Tensor> parameters() const = 0;

  /// The stage's sharded model, if it is one.
  virtual ShardedModel* sharded() const { return nullptr; }
};

/// Every rank has the whole stage. The gradients are always views of buckets, as those of
/// DistributedDataParallel are. Collective: rank 0's weights and buffers go to all.
std::unique_ptr<StageSync> make_averaged_stage(int stage, const torch::nn::Sequential& module,
                                               const Communicator& comm,
                                               const PipelineOptions& options);

/// Every rank has the whole stage, and every micro-batch is a virtual shard: see docs/same_bits.md.
/// Collective: rank 0's weights and buffers go to all.
std::unique_ptr<StageSync> make_part_stage(int stage, const torch::nn::Sequential& module,
                                           const Communicator& comm,
                                           const PipelineOptions& options);

/// The ranks divide the stage, as FullyShardedDataParallel does: see PipelineOptions::shard.
/// Collective: rank 0's weights and buffers go to all.
std::unique_ptr<StageSync> make_sharded_stage(int stage, const torch::nn::Sequential& module,
                                              const Communicator& comm,
                                              const PipelineOptions& options);

}  // namespace lockstep
