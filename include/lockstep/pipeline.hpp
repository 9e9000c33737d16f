#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/schedule.hpp"

namespace lockstep {

class GradScaler;

/// How the loss function puts rows together.
enum class LossReduction { kMean, kSum };

struct PipelineOptions {
  /// Of one micro-batch, on the last stage's device: loss(output, target), a scalar.
  std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> loss = {};
  LossReduction reduction = LossReduction::kMean;

  /// How many terms the loss of a micro-batch is the mean of, told from its target: what kMean
  /// weighs micro-batches by, and ranks of `data`. Empty: the rows. A loss that leaves out targets
  /// needs it, as cross_entropy with ignore_index does: see count_targets(). With 0 the loss is not
  /// computed. The calling thread calls it before a step, where the last stage is.
  std::function<double(const torch::Tensor& target)> loss_weight = {};

  /// Stages that keep only their input and compute their forward again when its backward comes.
  std::vector<int> recompute = {};

  /// Ranks with the same stages and other rows: their gradients are averaged once per step, by
  /// rows or loss_weight, each stage's as soon as its last backward has ended.
  std::optional<Communicator> data = {};
  int64_t bucket_cap_bytes = int64_t{25} << 20;
  bool broadcast_buffers = true;  ///< data rank 0's buffers to all before each step

  /// Refuses weights that changed after steps whose gradients were not averaged over `data`. False
  /// for methods that change weights on purpose and change them back, such as SAM.
  bool check_unaveraged_updates = true;

  Nonfinite nonfinite = Nonfinite::kWarn;  ///< gradients that `data` would average
};

/// For PipelineOptions::loss_weight: counts the targets that are not `ignore_index`, which are
/// those that cross_entropy and nll_loss take the mean of.
std::function<double(const torch::Tensor& target)> count_targets(int64_t ignore_index = -100);

/// One call of Pipeline::step.
struct PipelineStep {
  double loss_factor = 1;        ///< 1 / accum_steps where gradients of several calls add up
  bool synchronise = true;       ///< false: nothing is averaged yet, as inside NoSync
  GradScaler* scaler = nullptr;  ///< multiplies the losses that go backward
};

/// When an action ran, in times of monotonic_ns(): from having its input to having its result.
struct ActionSpan {
  Action action;
  int place = 0;
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
  std::vector<SyncSpan> syncs;      ///< empty where nothing was averaged
};

/// What the local stages sent to others so far.
struct LinkStats {
  int64_t messages = 0;
  int64_t bytes = 0;
};

/// Trains a model in stages, each on a device of its own, with micro-batches flowing through them
/// as a schedule says.
///
///     auto stages = lockstep::split_stages(model, lockstep::cut_by_count(model->size(), 2));
///     lockstep::Pipeline pipeline(stages, devices, lockstep::one_f_one_b(2, 8),
///                                 {.loss = [](auto& out, auto& y) { return torch::mse_loss(out,
///                                 y); }});
///     lockstep::Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
///     auto loss = pipeline.step(x, y);   // forward and backward of all micro-batches
///     optimizer.step();
///
/// A batch is divided by torch.tensor_split's rule and micro-batches count by their rows, or by
/// PipelineOptions::loss_weight, so that gradients and loss are those of the whole batch on one
/// device. Autocast that is in force around
/// step() holds in every forward. Random numbers of a forward depend on the caller's seed, the
/// call, the stage and the micro-batch, not on the schedule or on who runs it.
class Pipeline {
 public:
  /// All stages in this process: stage s on devices[schedule.place_of_stage[s]]. Weights move
  /// there. With options.data: collective over that.
  Pipeline(std::vector<torch::nn::Sequential> stages, const Devices& devices, Schedule schedule,
           PipelineOptions options);

  /// Stages on the ranks of an axis: place p is rank p of `axis`, which works on `device`. Every
  /// rank gives all stages, of which it keeps its own, or undefined ones (nullptr) for the others.
  /// Collective over `axis`, and over options.data.
  Pipeline(std::vector<torch::nn::Sequential> stages, const Communicator& axis, Device& device,
           Schedule schedule, PipelineOptions options);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Forward and backward of a batch; gradients add to those that are there. Gives the loss of the
  /// batch, before any factor, on every rank of the axis. `x` is needed where stage 0 is, `y` where
  /// the last one is. Where `x` requires a gradient, the rank with stage 0 goes on backward from
  /// it: to x.grad(), or into what made `x`. Collective.
  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& y, const PipelineStep& how = {});

  /// The model's output for these rows, without gradients; on ranks of an axis only where the last
  /// stage is, undefined elsewhere. Collective.
  torch::Tensor evaluate(const torch::Tensor& x);

  const Schedule& schedule() const;
  const std::vector<int>& local_stages() const;
  const torch::nn::Sequential& stage(int stage) const;  ///< a local one
  Device& device_of(int stage) const;                   ///< of a local one

  /// Of the local stages, in order.
  std::vector<torch::Tensor> parameters() const;

  /// Runs `work(stage)` for each local stage on its device, all devices at once: for an optimizer
  /// per stage. `name` appears in the timeline.
  void for_each_stage(const char* name, const std::function<void(int stage)>& work);

  /// Of the last step(); empty where that failed. Waits for GPUs.
  const StepTrace& last_step() const;
  LinkStats links() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
