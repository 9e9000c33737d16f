#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <vector>

#include "course/job_record.hpp"
#include "course/options.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/record.hpp"
#include "lockstep/run_meter.hpp"
#include "lockstep/trace.hpp"
#include "lockstep/world.hpp"

namespace lockstep {
class Pipeline;
}

namespace course {

struct HybridFacts;
class PipelineMeter;

/// What happens around a training loop: the start line, progress, measurement, the result table,
/// the record, the timeline and the saved weights. Of several ranks only rank 0 prints and writes,
/// and what it writes is the whole job's.
class Run {
 public:
  Run(const Options& options, const lockstep::Devices& devices);
  Run(const Options& options, const lockstep::World& world);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// From now on this model's communication is measured and drawn; it must outlive the run.
  template <class Module>
  void watch(lockstep::DistributedDataParallel<Module>& ddp) {
    watch(ddp.sync());
  }
  void watch(lockstep::GradientSync& sync);

  /// Its skipped steps are printed and recorded; it must outlive the run.
  void watch(lockstep::GradScaler& scaler) { scaler_ = &scaler; }

  /// The record says whether it was captured; it must live until finish().
  void watch(const lockstep::CapturedStep& step) { step_ = &step; }

  /// Its stages are measured, drawn and recorded; it must outlive the run. note_call() after each
  /// of its steps.
  void watch(const lockstep::Pipeline& pipeline, HybridFacts facts);
  void note_call(int64_t micro_step);

  void begin_step() { meter_.begin_step(); }
  void end_step(const torch::Tensor& loss);

  /// A part of the step begins, for the timeline; it ends where the next or the step does.
  void phase(const char* name);

  /// Before backward: measures autocast's copies of the weights, in the first step only.
  void note_forward(const torch::Tensor& loss);

  /// Before the update: looks at the gradients, in the first step only.
  void note_gradients(const torch::nn::Module& net);

  /// Rows each device of this process got of a batch, for the record.
  void set_split(std::vector<int64_t> rows) { record_.split = std::move(rows); }

  /// Prints and writes everything; the loop is over and its tensors are gone. Collective. With an
  /// optimizer the record says what the peak memory is made of.
  void finish(const torch::nn::Module& net, const torch::optim::Optimizer* optimizer = nullptr);

  /// The same; masters go back into the net before it is saved.
  void finish(torch::nn::Module& net, const torch::optim::Optimizer& optimizer,
              const std::optional<lockstep::MasterWeights>& masters);

 private:
  Run(const Options& options, const lockstep::Devices& devices, const lockstep::World* world);

  bool prints() const { return rank_ == 0 && !options_.quiet; }
  void start_trace();
  void print_start_line() const;
  void print_progress() const;
  void end_phase(int64_t at_ns);
  void trace_wait();
  void trace_call();
  void print_skipped_steps();
  void note_precision();
  void note_capture();
  void complete_record(const torch::nn::Module& net, const torch::optim::Optimizer* optimizer,
                       const std::optional<lockstep::MasterWeights>& masters);
  void write_results(const torch::nn::Module& net);
  void finish_process(const torch::nn::Module& net);
  void finish_job(const torch::nn::Module& net);

  const Options& options_;
  const lockstep::Devices& devices_;
  const lockstep::World* world_;  // null: a program of one process
  int rank_;
  lockstep::GradientSync* sync_ = nullptr;        // null: nothing is watched
  lockstep::GradScaler* scaler_ = nullptr;        // null: none
  const lockstep::CapturedStep* step_ = nullptr;  // null: none
  std::unique_ptr<PipelineMeter> stages_;         // null: the model is not in stages
  size_t skipped_printed_ = 0;
  std::optional<int64_t> low_precision_bytes_;  // autocast's copies of weights
  lockstep::Trace trace_;                       // of this rank
  lockstep::RunRecord record_;                  // of this rank
  int64_t clock_ns_ = 0;                        // see RankReport
  const char* phase_ = nullptr;                 // null: none has begun
  int64_t phase_began_ns_ = 0;
  int64_t last_print_ns_ = 0;
  lockstep::RunMeter meter_;  // last: its clock starts when all else is ready
};

}  // namespace course
