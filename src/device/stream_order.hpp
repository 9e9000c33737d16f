#pragma once

#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "lockstep/device.hpp"

namespace lockstep {

/// A point in the work queued on a stream that other streams can wait for. On the CPU, where work
/// is done when the call returns, it is nothing.
class StreamOrder {
 public:
  /// The point reached now by the calling thread's current stream on `device`'s hardware.
  static StreamOrder now(const Device& device);

  /// Work queued from now on by the calling thread on `device`'s hardware starts after that point.
  void hold_back(const Device& device) const;

 private:
  std::optional<c10::Event> event_;
};

/// Tells the GPU allocator that `tensor` is in use on the calling thread's current stream, so that
/// freeing it elsewhere does not hand its memory out too early.
void keep_for_current_stream(const torch::Tensor& tensor);

}  // namespace lockstep
