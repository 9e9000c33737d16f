#pragma once

#include <string>
#include <variant>
#include <vector>

namespace lockstep {

/// How the numbers of an axis are written: "12.5 ms", "3.0 MiB", "45 %" (of the number 45).
enum class Unit { kNumber, kMilliseconds, kBytes, kPercent };

/// One colour of a bar chart.
struct BarSeries {
  std::string name = {};
  std::vector<double> values = {};      ///< [category]; not a number: no bar
  std::vector<double> deviations = {};  ///< [category], drawn as whiskers; or empty
};

struct BarChart {
  std::string title = {};
  Unit unit = Unit::kNumber;
  std::vector<std::string> categories = {};
  std::vector<BarSeries> series = {};
  bool stacked = false;  ///< series on top of each other instead of side by side
};

struct LineSeries {
  std::string name = {};
  std::vector<double> x = {};
  std::vector<double> y = {};           ///< not a number: a gap
  std::vector<double> deviations = {};  ///< as long as y, or empty
  bool reference = false;               ///< an ideal or a limit: thin, dashed, grey, no markers
};

struct LineChart {
  std::string title = {};
  std::string x_label = {};
  Unit unit = Unit::kNumber;
  std::vector<LineSeries> series = {};
  bool log_x = false;     ///< base 2: for 1, 2, 4, 8
  bool log_y = false;     ///< base 10: for losses
  bool from_zero = true;  ///< the y axis begins at 0
};

struct TimelineSpan {
  std::string name = {};
  double begin_ms = 0;
  double end_ms = 0;
  int colour = 0;  ///< of the palette
};

struct TimelineRow {
  std::string label = {};
  std::vector<TimelineSpan> spans = {};
};

struct Timeline {
  std::string title = {};
  std::vector<TimelineRow> rows = {};
  std::vector<std::string> legend = {};  ///< [colour] what it stands for; "": not in the legend
};

using Chart = std::variant<BarChart, LineChart, Timeline>;

/// A chart with the sentence under it.
struct Figure {
  Chart chart;
  std::string caption = {};
};

}  // namespace lockstep
