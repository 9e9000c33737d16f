#pragma once

#include <string>
#include <variant>
#include <vector>

namespace lockstep {

/// How numbers are written: "12.5 ms", "3.0 MiB", "45 %" for the number 45.
enum class Unit { kNumber, kMilliseconds, kBytes, kPercent };

/// The bars of one colour.
struct BarSeries {
  std::string name = {};
  std::vector<double> values = {};      ///< [category]; a NaN has no bar
  std::vector<double> deviations = {};  ///< [category], drawn as whiskers; may be empty
};

struct BarChart {
  std::string title = {};
  Unit unit = Unit::kNumber;
  std::vector<std::string> categories = {};
  std::vector<BarSeries> series = {};
  bool stacked = false;  ///< stacks the series instead of placing them side by side
};

struct LineSeries {
  std::string name = {};
  std::vector<double> x = {};
  std::vector<double> y = {};           ///< a NaN leaves a gap
  std::vector<double> deviations = {};  ///< as long as y, or empty
  bool reference = false;  ///< an ideal or a limit, drawn thin, dashed and grey without markers
};

struct LineChart {
  std::string title = {};
  std::string x_label = {};
  Unit unit = Unit::kNumber;
  std::vector<LineSeries> series = {};
  bool log_x = false;     ///< base 2, for 1, 2, 4, 8
  bool log_y = false;     ///< base 10, for losses
  bool from_zero = true;  ///< starts the y axis at 0
};

struct TimelineSpan {
  std::string name = {};
  double begin_ms = 0;
  double end_ms = 0;
  int colour = 0;  ///< index in the palette
};

struct TimelineRow {
  std::string label = {};
  std::vector<TimelineSpan> spans = {};
};

struct Timeline {
  std::string title = {};
  std::vector<TimelineRow> rows = {};
  std::vector<std::string> legend = {};  ///< [colour]; "" leaves a colour out of the legend
};

using Chart = std::variant<BarChart, LineChart, Timeline>;

/// A chart with its caption.
struct Figure {
  Chart chart;
  std::string caption = {};
};

}  // namespace lockstep
