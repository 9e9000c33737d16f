#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

namespace lockstep {

/// A point in time on a device: now on the CPU, where work is done when a call returns; on a GPU
/// the time at which the calling thread's current stream gets there.
class Moment {
 public:
  static Moment now(torch::Device device);
  static Moment of(c10::Stream stream);  ///< a GPU's, whichever is current

  /// In times of monotonic_ns(). Waits for the GPU to get there.
  int64_t ns() const;

  /// From `earlier` on the same device to here; finer than the difference of two ns(). Waits.
  int64_t since(const Moment& earlier) const;

  bool reached() const;

 private:
  int64_t host_ns_ = 0;
  std::shared_ptr<void> event_;  // of a GPU; null on the CPU
};

}  // namespace lockstep
