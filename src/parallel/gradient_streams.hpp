#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <span>
#include <vector>

#include "parallel/gradient_buckets.hpp"

namespace lockstep {

/// The streams that gradients are written on, one for each GPU that holds parameters.
///
/// Note [Hooks of several GPUs]: autograd has a thread for each GPU, and whichever brings a
/// bucket's last gradient launches it and those that waited behind it, also buckets of other GPUs.
/// On those its current stream is not the one their gradients are written on. So hooks make these
/// streams current; at the end of backward autograd lets the caller's wait for them.
class GradientStreams {
 public:
  explicit GradientStreams(std::span<const TrainedParameter> parameters);

  /// From now on gradients are written on the calling thread's current streams.
  void follow_current();

  /// Empty before the first follow_current(), and where there is no GPU.
  const std::vector<c10::Stream>& all() const { return streams_; }

 private:
  std::span<const TrainedParameter> parameters_;
  std::vector<torch::Device> gpus_;
  std::vector<c10::Stream> streams_;  // [gpu]
};

}  // namespace lockstep
