#include "report/draw_chart.hpp"

#include <algorithm>
#include <array>

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

constexpr size_t kTitleLines = 2;

Box without_top(const Box& box, double height) {
  return {box.x, box.y + height, box.width, std::max(0.0, box.height - height)};
}

// Adds lines through a box, `gap` apart, that rise or fall at 45 degrees.
void add_diagonals(std::vector<Segment>& lines, const Box& box, double gap, bool rising) {
  for (double offset = gap / 2; offset < box.width + box.height; offset += gap) {
    // Goes along the bottom edge and cuts each line off at the sides and at the top.
    const double over = std::max(0.0, offset - box.width);
    const double reach = std::min(offset, box.height);
    const double from = std::min(offset, box.width);
    const double to = offset - reach;
    const auto x = [&](double along) { return rising ? box.right() - along : box.x + along; };
    lines.push_back({{x(from), box.bottom() - over}, {x(to), box.bottom() - reach}});
  }
}

void add_levels(std::vector<Segment>& lines, const Box& box, double gap, bool upright) {
  const double length = upright ? box.width : box.height;
  for (double offset = gap; offset < length; offset += gap) {
    if (upright) {
      lines.push_back({{box.x + offset, box.y}, {box.x + offset, box.bottom()}});
    } else {
      lines.push_back({{box.x, box.bottom() - offset}, {box.right(), box.bottom() - offset}});
    }
  }
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

Box draw_title(Canvas& canvas, const std::string& title, const Box& box, double font_size) {
  if (title.empty()) return box;
  const Font font{.size = font_size * 1.12, .bold = true};
  std::vector<std::string> lines = wrap_lines(title, font, box.width);
  if (lines.size() > kTitleLines) {
    for (size_t i = kTitleLines; i < lines.size(); ++i) lines[kTitleLines - 1] += " " + lines[i];
    lines.resize(kTitleLines);
    lines.back() = fit_text(lines.back(), font, box.width);
  }
  double y = box.y;
  for (const auto& line : lines) {
    canvas.text({box.x, y + kAscent * font.size}, line, {.font = font, .colour = {}});
    y += font.size * 1.25;
  }
  return without_top(box, y - box.y + font_size * 0.45);
}

Box draw_legend(Canvas& canvas, const std::vector<LegendEntry>& entries, const Box& box,
                double font_size) {
  if (entries.size() < 2) return box;
  const Font font{.size = font_size};
  const double swatch = font_size * 1.7;
  const double gap = font_size * 0.5;
  const double line_height = font_size * 1.5;
  double x = box.x;
  double y = box.y;
  for (const auto& entry : entries) {
    const std::string name = fit_text(entry.name, font, std::max(0.0, box.width - swatch - gap));
    const double width = swatch + gap + text_width(name, font);
    if (x > box.x && x + width > box.right()) {
      x = box.x;
      y += line_height;
    }
    entry.swatch(canvas, {x, y + font_size * 0.08, swatch, font_size * 0.74});
    canvas.text({x + swatch + gap, y + kAscent * font_size}, name,
                {.font = font, .colour = {Role::kInk}});
    x += width + font_size * 1.4;
  }
  return without_top(box, y - box.y + line_height + font_size * 0.3);
}

void draw_no_data(Canvas& canvas, const Box& box, double font_size) {
  canvas.text({box.x + box.width / 2, box.y + box.height / 2}, "no data",
              {.font = {.size = font_size}, .colour = {Role::kMuted}, .anchor = Anchor::kMiddle});
}

double labels_width(const Axis& axis, const Font& font) {
  double widest = 0;
  for (const auto& tick : axis.ticks) widest = std::max(widest, text_width(tick.label, font));
  return widest + font.size * 0.6;
}

double y_of(const Axis& axis, const Box& plot, double value) {
  return plot.bottom() - axis.position(value) * plot.height;
}

void draw_value_axis(Canvas& canvas, const Axis& axis, const Box& plot, const Font& font) {
  std::vector<Segment> lines;
  for (const auto& tick : axis.ticks) {
    const double y = y_of(axis, plot, tick.value);
    lines.push_back({{plot.x, y}, {plot.right(), y}});
    canvas.text({plot.x - font.size * 0.6, y + font.size * 0.35}, tick.label,
                {.font = font, .colour = {Role::kMuted}, .anchor = Anchor::kEnd});
  }
  canvas.segments(lines, {.colour = {Role::kGrid}, .width = font.size * 0.07});
}

void draw_bottom_labels(Canvas& canvas, const Axis& axis, const Box& plot, const Box& box,
                        const Font& font) {
  double free_from = box.x;
  for (const auto& tick : axis.ticks) {
    const double width = text_width(tick.label, font);
    const double middle = plot.x + axis.position(tick.value) * plot.width;
    const double left = std::clamp(middle - width / 2, box.x, std::max(box.x, box.right() - width));
    if (left < free_from) continue;
    canvas.text({left, plot.bottom() + font.size * 1.3}, tick.label,
                {.font = font, .colour = {Role::kMuted}});
    free_from = left + width + font.size * 0.6;
  }
}

void draw_hatched(Canvas& canvas, const Box& box, int index, double font_size) {
  canvas.rectangle(box, {Role::kPalette, index});
  const double gap = font_size * 0.62;
  std::vector<Segment> lines;
  switch (palette_index(index)) {
    case 1:
      add_diagonals(lines, box, gap, true);
      break;
    case 2:
      add_diagonals(lines, box, gap, false);
      break;
    case 3:
      add_levels(lines, box, gap * 0.7, false);
      break;
    case 4:
      add_levels(lines, box, gap * 0.7, true);
      break;
    case 5:
      add_diagonals(lines, box, gap, true);
      add_diagonals(lines, box, gap, false);
      break;
    default:
      return;
  }
  if (lines.empty()) return;
  canvas.segments(lines, {.colour = {Role::kPaper}, .width = font_size * 0.07});
}

void draw_marker(Canvas& canvas, Point at, int index, double radius) {
  const Colour colour{Role::kPalette, index};
  const auto [x, y] = at;
  const double r = radius;
  switch (palette_index(index) % 4) {
    case 0:
      canvas.circle(at, r, colour);
      break;
    case 1:
      canvas.rectangle({x - r * 0.9, y - r * 0.9, r * 1.8, r * 1.8}, colour);
      break;
    case 2:
      canvas.polygon(std::array{Point{x, y - r * 1.2}, Point{x + r * 1.1, y + r * 0.8},
                                Point{x - r * 1.1, y + r * 0.8}},
                     colour);
      break;
    default:
      canvas.polygon(std::array{Point{x, y - r * 1.3}, Point{x + r * 1.3, y}, Point{x, y + r * 1.3},
                                Point{x - r * 1.3, y}},
                     colour);
  }
}

void draw_whisker(Canvas& canvas, double x, double top, double bottom, double half_width,
                  Colour colour) {
  if (bottom - top < 0.5) return;
  const std::array lines = {Segment{{x, top}, {x, bottom}},
                            Segment{{x - half_width, top}, {x + half_width, top}},
                            Segment{{x - half_width, bottom}, {x + half_width, bottom}}};
  canvas.segments(lines, {.colour = colour, .width = 0.9});
}

}  // namespace lockstep
