#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

namespace lockstep {

/// A stream of a GPU that nobody else has while this lives. libtorch's pool hands out its 32 in
/// turns: the 33rd user would share one with the first, and what the one queues could land in what
/// the other captures.
class OwnStream {
 public:
  explicit OwnStream(torch::Device gpu);

  /// The stream goes to whoever asks next, with what is still queued on it.
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  c10::Stream get() const { return stream_; }

 private:
  const c10::Stream stream_;
};

}  // namespace lockstep
