#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/device.hpp"

namespace lockstep {

/// A point in time on a device: now on the CPU, where work is done when a call returns; on a GPU
/// the time at which the calling thread's current stream gets there.
class Moment {
 public:
  static Moment now(const Device& device);

  /// In times of monotonic_ns(). Waits for the GPU to get there.
  int64_t ns() const;

 private:
  int64_t host_ns_ = 0;
  std::shared_ptr<void> event_;  // of a GPU; null on the CPU
};

}  // namespace lockstep
