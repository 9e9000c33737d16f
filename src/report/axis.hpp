#pragma once

#include <string>
#include <vector>

#include "report/chart.hpp"

namespace lockstep {

/// Whether a number can be drawn: finite, and far enough from the largest to reckon with.
bool is_plottable(double value);

/// One value as it is written beside a bar or point: "12.5 ms", "24.0 MiB", "45 %", "0.03125".
std::string format_value(Unit unit, double value);

struct Tick {
  double value = 0;
  std::string label;
};

/// A range of numbers with round ticks.
struct Axis {
  double low = 0;
  double high = 1;
  bool log = false;
  std::vector<Tick> ticks;  ///< ascending, all within the range

  /// Where a value lies: 0 at `low`, 1 at `high`; values outside are drawn at the nearer end.
  double place(double value) const;
};

/// From a round number at or below `low` to one at or above `high`, with about `wanted` steps
/// (of 1, 2 or 5 times a power of ten; of a power of two for bytes).
Axis linear_axis(double low, double high, Unit unit, int wanted);

/// Powers of `base`, or a part of them where there are many; both ends must be above 0.
Axis log_axis(double low, double high, double base, Unit unit);

/// An axis whose ticks are the given values: for few points, such as numbers of devices.
Axis point_axis(std::vector<double> values, bool log, Unit unit);

}  // namespace lockstep
