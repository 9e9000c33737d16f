#include "report/draw_chart.hpp"

#include <algorithm>

#include "report/axis.hpp"
#include "report/overloaded.hpp"

namespace lockstep {
namespace {

constexpr size_t kBarsSideBySide = 12;

// "name: category 1.5 ms, other 2.0 ms".
template <class Labels>
std::string describe_series(const std::string& name, size_t count, const Labels& label_of) {
  constexpr size_t kMost = 24;
  std::string text = name.empty() ? "" : name + ": ";
  for (size_t i = 0; i < std::min(count, kMost); ++i) text += (i > 0 ? ", " : "") + label_of(i);
  if (count > kMost) text += " and " + std::to_string(count - kMost) + " more";
  return text + ". ";
}

std::string describe_bars(const BarChart& chart) {
  std::string text = "Bar chart. ";
  for (const auto& series : chart.series) {
    const size_t count = std::min(series.values.size(), chart.categories.size());
    text += describe_series(series.name, count, [&](size_t i) {
      return chart.categories[i] + " " + format_value(chart.unit, series.values[i]);
    });
  }
  return text;
}

std::string describe_lines(const LineChart& chart) {
  std::string text = "Line chart over " + chart.x_label + ". ";
  for (const auto& series : chart.series) {
    const size_t count = std::min(series.x.size(), series.y.size());
    text += describe_series(series.name, count, [&](size_t i) {
      return format_value(Unit::kNumber, series.x[i]) + " " + format_value(chart.unit, series.y[i]);
    });
  }
  return text;
}

std::string describe_timeline(const Timeline& chart) {
  std::string text = "Timeline. ";
  for (const auto& row : chart.rows) {
    text += describe_series(row.label, row.spans.size(), [&](size_t i) {
      const TimelineSpan& span = row.spans[i];
      return span.name + " from " + format_value(Unit::kMilliseconds, span.begin_ms) + " to " +
             format_value(Unit::kMilliseconds, span.end_ms);
    });
  }
  return text;
}

}  // namespace

void draw_chart(Canvas& canvas, const Chart& chart, const Box& box, double font_size) {
  std::visit(Overloaded{
                 [&](const BarChart& bars) { draw_bars(canvas, bars, box, font_size); },
                 [&](const LineChart& lines) { draw_lines(canvas, lines, box, font_size); },
                 [&](const Timeline& timeline) { draw_timeline(canvas, timeline, box, font_size); },
             },
             chart);
}

bool is_wide(const Chart& chart) {
  if (std::holds_alternative<Timeline>(chart)) return true;
  const auto* bars = std::get_if<BarChart>(&chart);
  if (bars == nullptr) return false;
  const size_t beside = bars->stacked ? 1 : std::max<size_t>(1, bars->series.size());
  return bars->categories.size() * beside > kBarsSideBySide;
}

double chart_height(const Chart& chart, double width, double font_size) {
  const auto* timeline = std::get_if<Timeline>(&chart);
  if (timeline == nullptr) return std::clamp(width * 0.62, font_size * 16, font_size * 25);
  const auto rows = static_cast<double>(std::max<size_t>(1, timeline->rows.size()));
  return font_size * (4 + std::min(rows * 2.0, 56.0));
}

const std::string& chart_title(const Chart& chart) {
  return std::visit([](const auto& any) -> const std::string& { return any.title; }, chart);
}

std::string describe_chart(const Chart& chart) {
  return std::visit(Overloaded{
                        [](const BarChart& bars) { return describe_bars(bars); },
                        [](const LineChart& lines) { return describe_lines(lines); },
                        [](const Timeline& timeline) { return describe_timeline(timeline); },
                    },
                    chart);
}

}  // namespace lockstep
