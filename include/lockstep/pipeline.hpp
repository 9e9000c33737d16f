#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/schedule.hpp"

namespace lockstep {

class GradScaler;

/// Divides a model's layers into stages. The layers are the model's own modules and keep their
/// names; layers per stage come from cut_by_count() or cut_by_cost(), or from the user.
///
///     auto stages = lockstep::split_stages(model, lockstep::cut_by_count(model->size(), 4));
std::vector<torch::nn::Sequential> split_stages(const torch::nn::Sequential& model,
                                                std::span<const int64_t> layers_per_stage);

/// Seconds that each layer takes for forward and backward of these rows, the best of a few runs:
/// the cost for cut_by_cost(). Weights, gradients and buffers do not change.
std::vector<double> measure_layers(const torch::nn::Sequential& model, const torch::Tensor& rows);

/// How the loss function combines rows.
enum class LossReduction { kMean, kSum };

/// The loss of a Pipeline, what it recomputes, and its data-parallel ranks.
struct PipelineOptions {
  /// Computes the loss of one micro-batch, a scalar, on the last stage's device. It must have no
  /// side effects: without loss_weight, some steps call it more often, to compare losses.
  std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss = {};
  LossReduction reduction = LossReduction::kMean;

  /// Returns how many terms the loss of a micro-batch averages, given its target. kMean weighs
  /// micro-batches, and the ranks of `data`, by it, or by rows if it is empty. A loss that leaves
  /// out targets needs it, such as cross_entropy with ignore_index: see count_targets(). If it
  /// returns 0, the loss is not computed. The calling thread calls it before a step, on the rank
  /// with the last stage.
  std::function<double(const torch::Tensor& target)> loss_weight = {};

  /// Stages that keep only their input and recompute their forward before the backward.
  std::vector<int> recompute = {};

  /// Ranks with the same stages and different rows. Gradients are averaged over them once per step,
  /// weighted by rows or loss_weight, for each stage as soon as its last backward has ended.
  std::optional<Communicator> data = {};
  int64_t bucket_cap_bytes = int64_t{25} << 20;

  /// Divides each stage over the ranks of `data`, as FullyShardedDataParallel does. Gradients are
  /// whole on each rank until the stage's last backward of a step; in stage 3 of ZeRO each action
  /// gathers the parameters again. A stage uses those of its `units` that it has.
  std::optional<ShardOptions> shard = {};
  bool broadcast_buffers = true;  ///< from data rank 0, before each step

  /// Refuses weights that changed after steps whose gradients were not averaged over `data`. Set it
  /// to false for methods that change weights on purpose and change them back, such as SAM.
  bool check_unaveraged_updates = true;

  Nonfinite nonfinite = Nonfinite::kWarn;  ///< in gradients that `data` averages

  /// As DdpOptions::virtual_shards and part_threads. Every micro-batch is a part: this is the
  /// number of micro-batches times the number of ranks of `data`. The weights are then the same
  /// bits for every number of data ranks, and step() returns the loss over all of them: see
  /// docs/same_bits.md.
  int64_t virtual_shards = 0;
  int part_threads = 1;
};

/// For PipelineOptions::loss_weight: counts the targets other than `ignore_index`, over which
/// cross_entropy and nll_loss take the mean.
std::function<double(const torch::Tensor& target)> count_targets(int64_t ignore_index = -100);

/// Options of one Pipeline::step().
struct PipelineStep {
  double loss_factor = 1;        ///< 1 / accum_steps if gradients of several calls add up
  bool synchronise = true;       ///< false: average nothing yet, as inside NoSync
  GradScaler* scaler = nullptr;  ///< scales the losses before backward
};

/// When an action ran, in times of monotonic_ns(): from the arrival of its input to its result.
struct ActionSpan {
  Action action;
  int rank = 0;  ///< pipeline rank
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

/// When a stage's gradients were averaged over the data axis.
struct SyncSpan {
  int stage = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t all_reduces = 0;
  int64_t bytes = 0;
};

/// What this process did in a step.
struct StepTrace {
  std::vector<ActionSpan> actions;  ///< of the local stages, by begin
  std::vector<SyncSpan> syncs;      ///< empty if nothing was averaged
};

/// What the local stages have sent to others so far.
struct LinkStats {
  int64_t messages = 0;
  int64_t bytes = 0;
};

/// Trains a model in stages, each on its own device, with micro-batches flowing through them in the
/// order of a schedule.
///
///     auto stages = lockstep::split_stages(model, lockstep::cut_by_count(model->size(), 2));
///     lockstep::Pipeline pipeline(
///         stages, devices, lockstep::one_f_one_b(2, 8),
///         {.loss = [](auto& out, auto& y) { return torch::mse_loss(out, y); }});
///     lockstep::Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
///     auto loss = pipeline.step(x, y);   // forward and backward of all micro-batches
///     optimizer.step();
///
/// A batch is divided by torch.tensor_split's rule, and micro-batches are weighted by their rows or
/// by PipelineOptions::loss_weight, so that gradients and loss are those of the whole batch on one
/// device. An Autocast around step() applies to every forward. The random numbers of a forward
/// depend on the caller's seed, the call, the stage and the micro-batch, but not on the schedule or
/// on the device that runs it.
class Pipeline {
 public:
  /// All stages in this process: stage s on devices[schedule.rank_of_stage[s]], where its weights
  /// are moved. Collective over options.data, if given.
  Pipeline(std::vector<torch::nn::Sequential> stages, const Devices& devices, Schedule schedule,
           PipelineOptions options);

  /// Stages on the ranks of an axis: pipeline rank p is rank p of `axis`, which works on `device`.
  /// Every rank passes all stages and keeps its own; the others may be undefined (nullptr).
  /// Collective over `axis` and options.data.
  Pipeline(std::vector<torch::nn::Sequential> stages, const Communicator& axis, Device& device,
           Schedule schedule, PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Runs forward and backward of a batch and adds to the gradients. Returns the loss of the batch,
  /// before any factor, on every rank of the axis. `x` is needed where stage 0 is, `y` where the
  /// last stage is. If `x` requires a gradient, the rank with stage 0 continues backward from it:
  /// to x.grad(), or into the graph that made `x`. Collective.
  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& y, const PipelineStep& how = {});

  /// Returns the model's output for these rows, without gradients; on an axis only on the rank with
  /// the last stage, undefined on the others. Collective.
  torch::Tensor evaluate(const torch::Tensor& x);

  const Schedule& schedule() const;
  const std::vector<int>& local_stages() const;
  const torch::nn::Sequential& stage(int stage) const;  ///< a local one
  Device& device_of(int stage) const;                   ///< of a local stage

  /// A local stage that is divided over the data axis, for GatheredParameters and a separate
  /// Checkpoint; nullptr if it is not divided.
  ShardedModel* sharded(int stage) const;

  /// The trained parameters of the local stages, in order; with PipelineOptions::shard, this rank's
  /// shards. A rank of an axis that trains none gets one empty tensor without a gradient: with it,
  /// its optimizer takes part in clipping and skips steps with the other stages.
  std::vector<torch::Tensor> parameters() const;

  /// Runs `work(stage)` for each local stage on its device, on all devices in parallel: for an
  /// optimizer per stage, for example. `name` appears in the timeline.
  void for_each_stage(const char* name, const std::function<void(int stage)>& work);

  /// As Device::random_position(), for the random numbers of the next step.
  int64_t random_position() const;
  void set_random_position(int64_t position);

  /// What the last step() did; empty if it failed. Waits for GPUs.
  const StepTrace& last_step() const;
  LinkStats links() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
