#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/moment.hpp"
#include "parallel/gradient_buckets.hpp"

namespace lockstep {

/// Notices gradients of this rank that are infinite or not a number, before the mean hands them to
/// all ranks: afterwards nobody can tell whose they were.
///
/// Note [Looking at gradients]
/// Reading every element once more costs some percent of a step that is bound by its weights. What
/// a bad row of a batch does to a gradient fills whole rows or columns of it, so where the answer
/// is only a warning, large CPU gradients are looked at in one element of each row and of each
/// column. Small ones, all of them where the answer is to stop, and those of a GPU are read whole.
/// Nobody waits for a GPU: what it found is known some steps later.
///
/// A GradScaler makes gradients overflow on purpose and skips such steps: as long as the process
/// has one that is enabled, nothing is looked at.
class NonfiniteGradients {
 public:
  /// `stats` counts what was found, and must outlive this object as `parameters` must. `prefix` is
  /// put before a parameter's name.
  NonfiniteGradients(std::span<const TrainedParameter> parameters, const Communicator& comm,
                     Nonfinite answer, DdpStats& stats, std::string prefix = "");

  /// Bucket number `bucket` of `buckets` is about to be averaged. Throws where the answer is to
  /// stop.
  void look(const GradientBuckets& buckets, size_t bucket);

  /// Takes in what GPUs have found by now.
  void settle();

 private:
  // What a GPU will have found in one bucket.
  struct Pending {
    int64_t step = 0;
    torch::Tensor first;  // the parameter's number, or -1, in pinned memory
    Moment done;
  };

  void look_on_cpu(const GradientBuckets& buckets, size_t bucket);
  void look_on_gpu(const GradientBuckets& buckets, size_t bucket);
  void report(size_t parameter, int64_t step);
  void warn(const std::string& message, bool weights_finite);

  std::span<const TrainedParameter> parameters_;
  const Communicator comm_;
  const Nonfinite answer_;
  DdpStats& stats_;
  const std::string prefix_;
  int64_t step_ = 0;           // synchronised steps so far, with the one that runs
  int64_t reported_step_ = 0;  // the last in which something was found
  int64_t warnings_due_ = 0;   // steps whose cause is this rank
  bool told_of_weights_ = false;
  std::deque<Pending> pending_;  // in the order of launch
};

}  // namespace lockstep
