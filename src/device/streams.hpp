#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/types.h>

#include <optional>

#include "lockstep/device.hpp"

namespace lockstep {

/// A GPU stream that nobody else uses while this lives. libtorch's pool has 32 streams and hands
/// them out in turn: the 33rd user would share one with the first, and work that one of them queues
/// could become part of what the other captures.
class OwnStream {
 public:
  explicit OwnStream(torch::Device gpu);

  /// Returns the stream for reuse, with the work that is still queued on it.
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  c10::Stream get() const { return stream_; }

 private:
  const c10::Stream stream_;
};

/// A point in the work queued on a stream that other streams can wait for. It is empty on the CPU,
/// where work is done when a call returns.
class StreamOrder {
 public:
  /// The end of the work queued so far on the calling thread's current stream of `device`.
  static StreamOrder now(const Device& device);

  /// Makes work that the calling thread queues on `device` from now on wait for that point.
  void hold_back(const Device& device) const;

 private:
  std::optional<c10::Event> event_;
};

/// Tells the GPU allocator that the calling thread's current stream uses `tensor`, so that its
/// memory is not reused too early if it is freed elsewhere.
void keep_for_current_stream(const torch::Tensor& tensor);

}  // namespace lockstep
