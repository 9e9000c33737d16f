#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

inline namespace literals {
constexpr int64_t operator""_KiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 10;
}
constexpr int64_t operator""_MiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 20;
}
constexpr int64_t operator""_GiB(unsigned long long count) {
  return static_cast<int64_t>(count) << 30;
}
}  // namespace literals

/// "512 B", "1.50 KiB", "24.0 MiB", "2.25 GiB": powers of two, three significant digits.
std::string format_bytes(int64_t bytes);

/// "950 ns", "12.3 µs", "4.56 ms", "7.89 s", "2 min 05 s".
std::string format_seconds(double seconds);

}  // namespace lockstep
