#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "gradients/gradient_buckets.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/gradients.hpp"

namespace lockstep {

/// Finds gradients of this rank that are infinite or NaN before the mean passes them on to all
/// ranks: afterwards nobody can tell whose they were.
///
/// Note [Looking at gradients]
/// Reading every element once more costs a few percent of a step that is bound by its weights. A
/// bad row of a batch spoils whole rows or columns of a gradient. So if the answer is only a
/// warning, one element of each row and of each column of a large CPU gradient is read. Small
/// gradients, gradients on a GPU, and all gradients if the answer is to stop are read completely.
/// Nobody waits for a GPU: its findings are known a few steps later.
///
/// A GradScaler makes gradients overflow on purpose and skips such steps: nothing is checked as
/// long as the process has an enabled one.
class NonfiniteGradients {
 public:
  /// `stats` counts the findings. `stats` and `parameters` must outlive this object. `prefix` comes
  /// before a parameter's name in messages.
  NonfiniteGradients(std::span<const TrainedParameter> parameters, const Communicator& comm,
                     Nonfinite answer, DdpStats& stats, std::string prefix = "");

  /// Checks bucket number `bucket`, which is about to be averaged. Throws if the answer is to stop.
  void look(const GradientBuckets& buckets, size_t bucket);

  /// Checks the gradients of a part of the batch: [parameter], undefined if there is none. A
  /// step of virtual shards has several parts; `first`: of this rank's.
  void look(std::span<const torch::Tensor> gradients, bool first);

  /// Reports what GPUs have found by now.
  void settle();

 private:
  // What a GPU finds in one bucket.
  struct Check {
    int64_t step = 0;
    torch::Tensor first;  // in pinned memory: the first such parameter, or -1
    DeviceEvent done;
  };

  bool looks() const;
  bool is_finite_on_cpu(const torch::Tensor& gradient) const;
  void look_on_cpu(const GradientBuckets& buckets, size_t bucket);
  void look_on_gpu(const std::vector<torch::Tensor>& gradients,
                   const std::vector<int32_t>& numbers);
  void report(size_t parameter, int64_t step);
  void warn(const std::string& message, bool weights_finite);

  std::span<const TrainedParameter> parameters_;
  const Communicator comm_;
  const Nonfinite answer_;
  DdpStats& stats_;
  const std::string prefix_;
  int64_t step_ = 0;           // synchronised steps so far, including the current one
  int64_t reported_step_ = 0;  // the last step with a finding
  int64_t warnings_due_ = 0;   // steps that this rank spoiled
  bool warned_of_weights_ = false;
  std::deque<Check> checks_;  // in the order of launch
};

}  // namespace lockstep
