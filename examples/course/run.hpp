#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "course/batches.hpp"
#include "course/options.hpp"
#include "course/run_checkpoint.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/record.hpp"
#include "lockstep/run_meter.hpp"
#include "lockstep/trace.hpp"
#include "lockstep/verify.hpp"
#include "lockstep/world.hpp"

namespace lockstep {
class Pipeline;
}

namespace course {

struct HybridFacts;
class PipelineMeter;

/// Everything around a training loop: the start line, progress, measurement, the result table, the
/// record, the timeline, the saved weights, checkpoints, and the capture of steps into CUDA graphs.
/// Of several ranks only rank 0 prints and writes, and what it writes is the whole job's.
///
///     course::Run run(options, world, {rows.count});
///     run.watch(ddp);
///     run.add("model", *net).add("optimizer", *optimizer, *net);
///     for (int64_t step = run.resume(); step < options.steps; ++step) {
///       run.step(batches.get_rows(step, rows), [&](const auto& x, const auto& y) {
///         ...               // forward, backward and update
///         return loss;
///       });
///       if (run.is_preempted()) return lockstep::kExitPreempted;
///     }
///     run.finish(*net);
class Run {
 public:
  /// `split`: the rows that each device of this process gets of a batch, for the record; none: the
  /// whole batch on one device.
  Run(const Options& options, const lockstep::Devices& devices);
  Run(const Options& options, const lockstep::World& world, std::vector<int64_t> split);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  void set_split(std::vector<int64_t> rows) { record_.split = std::move(rows); }

  /// Measures and draws this model's communication from now on; `ddp` must outlive the run.
  template <class Module>
  void watch(lockstep::DistributedDataParallel<Module>& ddp) {
    net_ = ddp.module().get();
    watch(ddp.sync());
  }

  /// Prints and records the steps that it skips; `scaler` must outlive the run.
  void watch(lockstep::GradScaler& scaler) { scaler_ = &scaler; }

  /// Measures, draws and records its stages; `pipeline` must outlive the run.
  void watch(const lockstep::Pipeline& pipeline, HybridFacts facts);

  /// Saves this with --checkpoint; the arguments are those of lockstep::Checkpoint::add.
  template <class... Part>
  Run& add(const std::string& name, Part&... part) {
    if (checkpoint_) checkpoint_->parts().add(name, part...);
    if constexpr ((std::is_base_of_v<torch::nn::Module, Part> && ...)) {
      (lockstep::verify_model(part), ...);
    }
    return *this;
  }

  /// Goes on from the latest checkpoint, if there is one. Returns the first step of the loop, from
  /// 0. Called when everything has been added. Collective.
  int64_t resume();

  /// Whether the run was asked to stop, and was saved after its last step: with --checkpoint,
  /// SIGTERM and SIGUSR1 stop all ranks after the same step. Nothing else is written then.
  bool is_preempted() const { return preempted_; }

  /// Runs and measures one optimizer step: `train` computes the gradients, updates the weights and
  /// returns the loss. On a GPU it is recorded once and then replayed as CUDA graphs, as --capture
  /// says; examples/tutorial_captured.cpp shows how.
  void step(
      const Batch& batch,
      const std::function<torch::Tensor(const torch::Tensor& x, const torch::Tensor& y)>& train);
  void step(const StepBatches& batches,
            const std::function<torch::Tensor(const StepBatches& batches)>& train);

  /// Called between backward and update, for the timeline. In the first step it also looks at the
  /// gradients, if the program accumulates them or computes in a lower precision.
  void before_update();

  /// Called after the backward of each micro-step. In the first --print-steps steps, rank 0 prints
  /// which micro-steps of all ranks synchronised, and the update, when the step has ended.
  void after_micro_step(int64_t micro);

  /// Called after each Pipeline::step. In the first --print-steps steps, rank 0 prints every
  /// forward, backward and synchronisation of all ranks when the step has ended.
  void after_pipeline_step(int64_t micro_step);

  /// Prints and writes everything, after the loop. Collective. With an optimizer the record says
  /// what the peak memory consists of; masters go back into the net before it is saved.
  void finish(const torch::nn::Module& net);
  void finish(torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
              const std::optional<lockstep::MasterWeights>& masters = std::nullopt);

 private:
  friend class MseLoss;
  using StepFunction = lockstep::CapturedStep::Function;

  Run(const Options& options, const lockstep::Devices& devices, const lockstep::World* world);

  void watch(lockstep::GradientSync& sync);
  bool prints() const { return rank_ == 0 && !options_.quiet; }
  void start_trace();
  void print_start_line() const;
  int64_t steps_done() const {
    return resumed_after_ + static_cast<int64_t>(meter_.losses().size());
  }
  void print_progress();
  void close_line();
  torch::Tensor train_on(const std::vector<torch::Tensor>& inputs, const StepFunction& train);
  void end_step(const torch::Tensor& loss);
  void begin_forward();
  void before_loss(const torch::Tensor& out);
  int64_t losses_in_step() const;
  void before_backward(const torch::Tensor& loss);
  void begin_phase(const char* name);
  void end_phase(int64_t at_ns);
  void trace_wait();
  void trace_pipeline_step();
  bool prints_micro_steps(int64_t step) const;
  std::string update_line(int64_t step) const;
  void save_checkpoint();
  void print_calls();
  void print_skipped_steps();
  void note_precision();
  void note_capture();
  void note_replicas();
  void complete_record(const torch::nn::Module& net,
                       const std::optional<lockstep::MasterWeights>& masters);
  void write_results(const torch::nn::Module& net);
  void finish_process(const torch::nn::Module& net);
  void finish_job(const torch::nn::Module& net);

  const Options& options_;
  const lockstep::Devices& devices_;
  const lockstep::World* world_;  // null: a program of one process
  int rank_;
  bool rewrites_;                    // progress is a line that is written over
  bool line_is_open_ = false;        // that line is on the screen
  int64_t first_step_ended_ns_ = 0;  // the first step has warm-up in it
  lockstep::CaptureOptions capture_;
  const StepFunction* train_ = nullptr;             // of the step that runs
  std::optional<lockstep::CapturedStep> captured_;  // none: the program's step is never captured
  lockstep::GradientSync* sync_ = nullptr;          // null: nothing is watched
  const torch::nn::Module* net_ = nullptr;          // that sync_ trains
  lockstep::GradScaler* scaler_ = nullptr;          // null: none
  std::unique_ptr<PipelineMeter> stages_;           // null: the model is not in stages
  std::string calls_text_;                          // of the step's micro-steps
  int64_t printed_reduces_ = 0;                     // of sync_, in calls_text_ so far
  int64_t printed_bytes_ = 0;                       // as printed_reduces_
  int64_t losses_computed_ = 0;                     // by MseLoss
  size_t skipped_printed_ = 0;
  std::optional<RunCheckpoint> checkpoint_;  // none: no --checkpoint
  int64_t resumed_after_ = 0;                // steps of earlier processes
  bool preempted_ = false;
  std::optional<int64_t> low_precision_bytes_;  // autocast's copies of weights
  lockstep::Trace trace_;                       // of this rank
  lockstep::RunRecord record_;                  // of this rank
  int64_t clock_ns_ = 0;                        // see RankReport
  const char* phase_ = nullptr;                 // null: none has begun
  int64_t phase_began_ns_ = 0;
  int64_t last_print_ns_ = 0;
  lockstep::RunMeter meter_;  // last: its clock starts when all else is ready
};

/// torch::mse_loss, as PyTorch's nn.MSELoss. It also tells the run that backward comes next, and
/// plants the infinite gradient of --overflow-at.
class MseLoss {
 public:
  explicit MseLoss(Run& run) : run_(run) {}
  torch::Tensor operator()(const torch::Tensor& out, const torch::Tensor& y) const;

 private:
  Run& run_;
};

}  // namespace course
