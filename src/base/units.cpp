#include "lockstep/units.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace lockstep {
namespace {

// Three significant digits for 1 <= value < 1024.
std::string three_digits(double value) {
  if (value < 9.995) return fmt::format("{:.2f}", value);
  if (value < 99.95) return fmt::format("{:.1f}", value);
  return fmt::format("{:.0f}", value);
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  static constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB"};
  const bool negative = bytes < 0;
  double value = std::abs(static_cast<double>(bytes));
  const char* sign = negative ? "-" : "";
  if (value < 1024) return fmt::format("{}{:.0f} B", sign, value);
  size_t unit = 0;
  value /= 1024;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{}{} {}", sign, three_digits(value), kUnits.at(unit));
}

std::string format_seconds(double seconds) {
  if (seconds < 0) return "-" + format_seconds(-seconds);
  if (!std::isfinite(seconds)) return fmt::format("{} s", seconds);
  if (seconds < 999.5e-9) return fmt::format("{:.0f} ns", seconds * 1e9);
  if (seconds < 999.5e-6) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 999.5e-3) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 99.95) return three_digits(seconds) + " s";
  const auto whole = std::llround(seconds);
  return fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

}  // namespace lockstep
