#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"
#include "pipeline/channel.hpp"
#include "pipeline/stage.hpp"

namespace lockstep {

/// Faults of `lockstep run --inject` that happen inside a step, each in a stage; -1: it does not.
struct StepFaults {
  int nan_stage = -1;       ///< a gradient of it becomes NaN
  int mismatch_stage = -1;  ///< it calls another collective than the other ranks
};

/// The micro-batches of a step as virtual shards.
struct StepParts {
  int64_t first = 0;            ///< this rank's first one, of all
  std::vector<double> weights;  ///< [micro-batch]
  double divisor = 1;           ///< of the weighted sum of all parts
};

/// What all pipeline ranks must know of a step.
struct StepPlan {
  torch::Tensor x;                          ///< undefined on ranks without stage 0
  torch::Tensor y;                          ///< undefined on ranks without the last stage
  std::vector<int64_t> rows;                ///< [micro-batch]
  std::vector<int64_t> row;                 ///< the sizes of x without its first; on every rank
  torch::ScalarType dtype = torch::kFloat;  ///< of x; on every rank
  std::vector<double> loss_shares;  ///< [micro-batch] of the batch's loss, where the last stage is
  double loss_factor = 1;           ///< multiplies what goes backward, as do the next two
  double data_factor = 1;           ///< see Note [Weights of accumulated gradients]
  torch::Tensor loss_scale;         ///< undefined: 1
  uint64_t seed = 0;
  bool synchronise = true;
  bool share_buffers = true;
  double weight = 1;  ///< of this rank on the data axis
  int compared = -1;  ///< this micro-batch's loss is compared with the next one's; -1: none is
  std::optional<StepParts> parts;  ///< with virtual shards
  StepFaults faults;

  bool has_loss(int micro_batch) const { return loss_shares[static_cast<size_t>(micro_batch)] > 0; }

  MicroBatchShape shape_of(int micro_batch) const {
    return {rows[static_cast<size_t>(micro_batch)], row, dtype};
  }

  /// The rows of a micro-batch, as a view of the batch's.
  torch::Tensor rows_of(const torch::Tensor& batch, size_t micro_batch) const;
};

/// Checks and divides each batch, and agrees with the other ranks on its rows and weights.
class StepPlanner {
 public:
  /// Keeps references. `axis` is empty if all stages are in this process.
  StepPlanner(const Schedule& schedule, const PipelineOptions& options,
              const std::optional<Communicator>& axis)
      : schedule_(schedule), options_(options), axis_(axis) {}

  /// Refuses ranks that weigh their losses differently. Collective over the axis and options.data.
  void require_same_weighing() const;

  /// `accumulates`: this call's gradients are summed with those of another. Seed, factors and what
  /// is shared are left to the caller. Collective.
  StepPlan plan_step(const torch::Tensor& x, const torch::Tensor& y, bool accumulates);
  StepPlan plan_evaluation(const torch::Tensor& x) const;

  /// Warns (once) if some micro-batches' losses are NaN and others are not, or if the loss of two
  /// micro-batches together is not the mean of their own.
  void check_losses(const std::vector<torch::Tensor>& losses,
                    const std::optional<LossComparison>& comparison);

 private:
  bool has_stage(int stage) const;
  bool has_last() const { return has_stage(schedule_.stages() - 1); }
  StepPlan plan_rows(const torch::Tensor& x, const torch::Tensor& y, bool trains) const;
  int64_t agree_on_batch(StepPlan& plan, int64_t rows, bool trains) const;
  void weigh_micro_batches(StepPlan& plan, bool accumulates) const;
  void weigh_parts(StepPlan& plan) const;
  std::vector<double> loss_weights_of_parts(const StepPlan& plan) const;
  std::vector<double> read_loss_weights(const StepPlan& plan) const;
  void warn_of_ignored_targets(const StepPlan& plan);
  bool warns_of_loss() const;
  void warn_of_loss(const std::string& what);
  int micro_batch_to_compare();

  const Schedule& schedule_;
  const PipelineOptions& options_;
  const std::optional<Communicator>& axis_;
  bool warned_of_loss_ = false;
  int64_t steps_ = 0;
};

}  // namespace lockstep
