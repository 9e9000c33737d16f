#include "report/axis.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr double kLargest = 1e290;
constexpr double kSmallest = 1e-290;
constexpr int kMostTicks = 40;

// The unit that all ticks of an axis share.
struct Scale {
  double divisor = 1;
  const char* suffix = "";
};

Scale scale_for(Unit unit, double largest) {
  static constexpr std::array kTimes = {Scale{1e-6, " ns"}, Scale{1e-3, " µs"}, Scale{1, " ms"},
                                        Scale{1e3, " s"}};
  static constexpr std::array kBytes = {Scale{1, " B"}, Scale{1024, " KiB"}, Scale{1 << 20, " MiB"},
                                        Scale{1 << 30, " GiB"}, Scale{1024.0 * (1 << 30), " TiB"}};
  const auto largest_below = [largest](const auto& scales) {
    Scale chosen = scales.front();
    for (const Scale& scale : scales) {
      if (largest >= scale.divisor) chosen = scale;
    }
    return chosen;
  };
  switch (unit) {
    case Unit::kMilliseconds:
      return largest_below(kTimes);
    case Unit::kBytes:
      return largest_below(kBytes);
    case Unit::kPercent:
      return {1, " %"};
    case Unit::kNumber:
      break;
  }
  return {};
}

std::string tick_label(double value, const Scale& scale) {
  if (value == 0) return "0";
  return fmt::format("{:.6g}{}", value / scale.divisor, scale.suffix);
}

// The smallest round step that is not below `raw`.
double round_step(double raw, Unit unit) {
  if (unit == Unit::kBytes) return std::max(1.0, std::exp2(std::ceil(std::log2(raw) - 1e-9)));
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power * (1 + 1e-9)) return factor * power;
  }
  return 10 * power;
}

void add_tick(Axis& axis, double value, const Scale& scale) {
  std::string label = tick_label(value, scale);
  if (!axis.ticks.empty() && axis.ticks.back().label == label) return;
  axis.ticks.push_back({value, std::move(label)});
}

void add_powers(Axis& axis, double base, const Scale& scale) {
  const double steps = (std::log(axis.high) - std::log(axis.low)) / std::log(base);
  const double every = std::max(1.0, std::ceil(steps / 6 - 1e-9));
  const double first = std::ceil(std::log(axis.low) / std::log(base) - 1e-9);
  for (int i = 0; i < kMostTicks; ++i) {
    const double value = std::pow(base, first + i * every);
    if (value > axis.high * (1 + 1e-9)) break;
    add_tick(axis, value, scale);
  }
}

// 1, 2 and 5 times each power of ten.
void add_rounds(Axis& axis, const Scale& scale) {
  const double first = std::floor(std::log10(axis.low));
  for (int i = 0; i < kMostTicks; ++i) {
    const double power = std::pow(10.0, first + i);
    if (power > axis.high * (1 + 1e-9)) break;
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * power;
      if (value >= axis.low && value <= axis.high) add_tick(axis, value, scale);
    }
  }
}

}  // namespace

bool is_plottable(double value) {
  return std::isfinite(value) && std::abs(value) < kLargest;
}

std::string format_value(Unit unit, double value) {
  if (!std::isfinite(value)) return fmt::format("{}", value);
  const double magnitude = std::abs(value);
  switch (unit) {
    case Unit::kMilliseconds:
      if (magnitude > 1e12) return fmt::format("{:.3g} s", value / 1e3);
      return value == 0 ? "0 ms" : format_seconds(value / 1e3);
    case Unit::kBytes:
      if (magnitude > 1e18) return fmt::format("{:.3g} B", value);
      return format_bytes(static_cast<int64_t>(std::llround(value)));
    case Unit::kPercent:
      return fmt::format("{:.3g} %", value);
    case Unit::kNumber:
      break;
  }
  if (magnitude < 1e6 && value == std::round(value)) return fmt::format("{:.0f}", value);
  return fmt::format("{:.4g}", value);
}

double Axis::position(double value) const {
  const double from = log ? std::log(low) : low;
  const double to = log ? std::log(high) : high;
  const double at = log ? std::log(std::clamp(value, low, high)) : value;
  return to > from ? std::clamp((at - from) / (to - from), 0.0, 1.0) : 0.5;
}

Axis linear_axis(double low, double high, Unit unit, int wanted) {
  if (std::abs(low) < kSmallest) low = 0;
  if (std::abs(high) < kSmallest) high = 0;
  const double size = std::max(std::abs(low), std::abs(high));
  if (high - low < size * 1e-9 || high <= low) {  // a single value gets room around it
    const double room = size > 0 ? size / 2 : 0.5;
    low = low == 0 ? 0 : low - room;
    high = high == 0 && low != 0 ? 0 : high + room;
  }
  const double step = round_step((high - low) / std::max(wanted, 1), unit);
  const double first = std::floor(low / step + 1e-9);
  const double last = std::max(std::ceil(high / step - 1e-9), first + 1);
  Axis axis{.low = first * step, .high = last * step, .log = false, .ticks = {}};
  const Scale scale = scale_for(unit, std::max(std::abs(axis.low), std::abs(axis.high)));
  for (int i = 0; i <= std::min(last - first, double{kMostTicks}); ++i) {
    add_tick(axis, (first + i) * step, scale);
  }
  return axis;
}

Axis log_axis(double low, double high, double base, Unit unit) {
  low = std::max(low, kSmallest);
  high = std::max(high, low);
  if (high <= low * 1.0001) {
    low /= base;
    high *= base;
  }
  Axis axis{.low = low, .high = high, .log = true, .ticks = {}};
  const Scale scale = scale_for(unit, high);
  add_powers(axis, base, scale);
  if (axis.ticks.size() >= 2) return axis;
  // With fewer than two powers between the ends, use round numbers.
  axis.ticks.clear();
  if (base == 10) add_rounds(axis, scale);
  if (axis.ticks.size() >= 2) return axis;
  axis.ticks.clear();
  for (const Tick& tick : linear_axis(low, high, unit, 5).ticks) {
    if (tick.value >= low && tick.value <= high) axis.ticks.push_back(tick);
  }
  return axis;
}

Axis point_axis(std::vector<double> values, bool log, Unit unit) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  Axis axis{.low = values.front(), .high = values.back(), .log = log, .ticks = {}};
  const double largest = std::max(std::abs(axis.low), std::abs(axis.high));
  for (const double value : values) add_tick(axis, value, scale_for(unit, largest));
  return axis;
}

}  // namespace lockstep
