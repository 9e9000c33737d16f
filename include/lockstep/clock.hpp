#pragma once

#include <cstdint>
#include <ctime>

namespace lockstep {

/// Nanoseconds of CLOCK_MONOTONIC, which never goes back and is the same in all processes of a
/// host.
inline int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace lockstep
