#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "course/options.hpp"
#include "lockstep/device.hpp"
#include "lockstep/record.hpp"
#include "lockstep/run_meter.hpp"
#include "lockstep/trace.hpp"

namespace course {

/// What happens around a training loop: the start line, progress, measurement, the result table,
/// the record, the timeline and the saved weights.
class Run {
 public:
  Run(const Options& options, const lockstep::Devices& devices);
  ~Run();

  void begin_step() { meter_.begin_step(); }
  void end_step(const torch::Tensor& loss);

  /// Rows each device got of a batch, for the record.
  void set_split(std::vector<int64_t> rows) { record_.split = std::move(rows); }

  /// Prints and writes everything; the loop is over and its tensors are gone.
  void finish(const torch::nn::Module& net);

 private:
  void print_start_line() const;
  void print_progress() const;
  void print_result() const;

  const Options& options_;
  const lockstep::Devices& devices_;
  lockstep::Trace trace_;
  lockstep::RunRecord record_;
  std::FILE* out_;  // for people; standard error where standard output carries the record
  int64_t last_print_ns_ = 0;
  lockstep::RunMeter meter_;  // last: its clock starts when all else is ready
};

/// --optimizer, from torch::optim.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(std::vector<torch::Tensor> parameters,
                                                        const Options& options);

/// Loads --init into the net where it was given.
void load_initial_weights(torch::nn::Module& net, const Options& options);

}  // namespace course
