#pragma once

#include <string>
#include <vector>

#include "report/chart.hpp"

namespace lockstep {

/// Whether a number can be drawn: it is finite and small enough to compute with.
bool is_plottable(double value);

/// A value as it is written beside a bar or point: "12.5 ms", "24.0 MiB", "45 %", "0.03125".
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

  /// The position of a value: 0 at `low`, 1 at `high`. A value outside is drawn at the nearer end.
  double position(double value) const;
};

/// An axis from a round number at or below `low` to one at or above `high`, with about `wanted`
/// steps. A step is 1, 2 or 5 times a power of ten; for bytes, a power of two.
Axis linear_axis(double low, double high, Unit unit, int wanted);

/// An axis with powers of `base` as ticks, or some of them if there are many. Both ends must be
/// above 0.
Axis log_axis(double low, double high, double base, Unit unit);

/// An axis whose ticks are the given values, for few points such as numbers of devices.
Axis point_axis(std::vector<double> values, bool log, Unit unit);

}  // namespace lockstep
