#include <algorithm>
#include <cmath>

#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

bool is_drawn(const TimelineSpan& span) {
  return is_plottable(span.begin_ms) && is_plottable(span.end_ms) && span.end_ms >= span.begin_ms;
}

// The time from the first start to the last end; empty if no span can be drawn.
struct TimelineExtent {
  double begin = INFINITY;
  double end = -INFINITY;
};

TimelineExtent extent_of(const Timeline& chart) {
  TimelineExtent extent;
  for (const auto& row : chart.rows) {
    for (const auto& span : row.spans) {
      if (!is_drawn(span)) continue;
      extent.begin = std::min(extent.begin, span.begin_ms);
      extent.end = std::max(extent.end, span.end_ms);
    }
  }
  return extent;
}

double x_of(const Axis& axis, const Box& plot, double ms) {
  return plot.x + axis.position(ms) * plot.width;
}

// Where the next span after `index` begins; for the last, the edge of the plot.
double free_until(const TimelineRow& row, size_t index, const Axis& axis, const Box& plot) {
  double until = plot.right();
  for (size_t other = 0; other < row.spans.size(); ++other) {
    const TimelineSpan& span = row.spans[other];
    if (other == index || !is_drawn(span) || span.end_ms <= row.spans[index].end_ms) continue;
    until = std::min(until, x_of(axis, plot, span.begin_ms));
  }
  return until;
}

// Draws a thin line between bars that touch, so that bars of one colour stay distinct.
void part_touching(Canvas& canvas, const TimelineRow& row, const Axis& axis, const Box& plot,
                   double top, double height, double font_size) {
  std::vector<Segment> lines;
  for (const auto& span : row.spans) {
    if (!is_drawn(span)) continue;
    const double left = x_of(axis, plot, span.begin_ms);
    const bool touching =
        std::any_of(row.spans.begin(), row.spans.end(), [&](const TimelineSpan& other) {
          return is_drawn(other) && other.begin_ms < span.begin_ms &&
                 std::abs(x_of(axis, plot, other.end_ms) - left) < font_size * 0.1;
        });
    if (touching) lines.push_back({{left, top}, {left, top + height}});
  }
  if (!lines.empty()) {
    canvas.segments(lines, {.colour = {Role::kPaper}, .width = font_size * 0.1});
  }
}

std::vector<LegendEntry> legend_of(const Timeline& chart) {
  std::vector<LegendEntry> entries;
  for (size_t colour = 0; colour < chart.legend.size(); ++colour) {
    if (chart.legend[colour].empty()) continue;
    entries.push_back({chart.legend[colour], [colour](Canvas& on, const Box& swatch) {
                         on.rectangle(swatch, {Role::kPalette, static_cast<int>(colour)});
                       }});
  }
  return entries;
}

// Draws the bars of one row, each with its name inside, or beside it if there is room.
void draw_row(Canvas& canvas, const TimelineRow& row, const Axis& axis, const Box& plot, double top,
              double height, double font_size) {
  const Font font{.size = font_size * 0.92};
  const double baseline = top + height / 2 + font.size * 0.36;
  const double room = font_size * 0.4;
  for (size_t i = 0; i < row.spans.size(); ++i) {
    const TimelineSpan& span = row.spans[i];
    if (!is_drawn(span)) continue;
    const double left = x_of(axis, plot, span.begin_ms);
    const double right = std::max(x_of(axis, plot, span.end_ms), std::min(left + 1, plot.right()));
    canvas.rectangle({left, top, right - left, height}, {Role::kPalette, span.colour});
    if (height < font.size) continue;
    const double width = text_width(span.name, font);
    if (width + 2 * room <= right - left) {
      canvas.text(
          {(left + right) / 2, baseline}, span.name,
          {.font = font, .colour = {Role::kOnPalette, span.colour}, .anchor = Anchor::kMiddle});
    } else if (right + room + width <= free_until(row, i, axis, plot)) {
      canvas.text({right + room, baseline}, span.name, {.font = font, .colour = {Role::kInk}});
    }
  }
}

}  // namespace

void draw_timeline(Canvas& canvas, const Timeline& chart, const Box& box, double font_size) {
  const TimelineExtent extent = extent_of(chart);
  Box rest = draw_title(canvas, chart.title, box, font_size);
  if (extent.begin > extent.end) {
    draw_no_data(canvas, rest, font_size);
    return;
  }
  rest = draw_legend(canvas, legend_of(chart), rest, font_size);
  const Font font{.size = font_size};
  double labels = 0;
  for (const auto& row : chart.rows) labels = std::max(labels, text_width(row.label, font));
  labels = std::min(labels, rest.width * 0.28) + font_size * 0.8;
  Axis axis = linear_axis(extent.begin, extent.end, Unit::kMilliseconds, 8);
  if (extent.end > extent.begin) {  // bars reach from edge to edge; only the ticks are round
    axis.low = extent.begin;
    axis.high = extent.end;
    std::erase_if(axis.ticks, [&](const Tick& tick) {
      return tick.value < extent.begin || tick.value > extent.end;
    });
  }
  // Half of the last tick's label is to the right of the plot.
  const double beside = axis.ticks.empty() ? 0 : text_width(axis.ticks.back().label, font) / 2;
  const Box plot{rest.x + labels, rest.y, std::max(1.0, rest.width - labels - beside),
                 std::max(1.0, rest.height - font_size * 1.8)};

  std::vector<Segment> lines;
  for (const auto& tick : axis.ticks) {
    const double x = x_of(axis, plot, tick.value);
    lines.push_back({{x, plot.y}, {x, plot.bottom()}});
  }
  canvas.segments(lines, {.colour = {Role::kGrid}, .width = font_size * 0.07});
  draw_bottom_labels(canvas, axis, plot, box, font);

  const double pitch = plot.height / static_cast<double>(chart.rows.size());
  for (size_t i = 0; i < chart.rows.size(); ++i) {
    const double top = plot.y + static_cast<double>(i) * pitch;
    draw_row(canvas, chart.rows[i], axis, plot, top + pitch * 0.12, pitch * 0.76, font_size);
    part_touching(canvas, chart.rows[i], axis, plot, top + pitch * 0.12, pitch * 0.76, font_size);
    if (pitch < font_size) continue;
    canvas.text({plot.x - font_size * 0.6, top + pitch / 2 + font_size * 0.35},
                fit_text(chart.rows[i].label, font, labels - font_size * 0.8),
                {.font = font, .colour = {Role::kInk}, .anchor = Anchor::kEnd});
  }
}

}  // namespace lockstep
