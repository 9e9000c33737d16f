#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "lockstep/clock.hpp"
#include "support.hpp"

namespace lockstep::test {

constexpr const char* kToken = "a secret of thirty-two characters";

inline int64_t in_ms(int64_t milliseconds) {
  return monotonic_ns() + milliseconds * 1'000'000;
}

inline void pause_ms(int64_t milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// For a Unix socket of this test's own.
inline std::string unique_name(const std::string& what) {
  static std::atomic<int> count = 0;
  return "lockstep-test-" + what + "-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
}

}  // namespace lockstep::test
