#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

namespace lockstep {

/// A point in time on a device. On a GPU, it is when a stream has done the work queued on it so
/// far; on the CPU, where work is done when a call returns, it is the time of the call.
class DeviceEvent {
 public:
  static DeviceEvent now(torch::Device device);  ///< on the calling thread's current stream
  static DeviceEvent of(c10::Stream stream);     ///< on this stream of a GPU

  /// Its time by monotonic_ns(). Waits for the GPU to get there.
  int64_t ns() const;

  /// Nanoseconds since `earlier` on the same device, more precise than the difference of two ns().
  /// Waits for the GPU to get there.
  int64_t since(const DeviceEvent& earlier) const;

  bool reached() const;

 private:
  int64_t host_ns_ = 0;
  std::shared_ptr<void> event_;  // of a GPU; null on the CPU
};

}  // namespace lockstep
