#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

constexpr size_t kMostMarkers = 24;  // per series; more would hide the line
constexpr size_t kMostValues = 14;   // written beside points
constexpr size_t kMostPointTicks = 8;

struct DataPoint {
  double x;
  double y;
  double deviation;
};

// The points of a series between its gaps.
using Pieces = std::vector<std::vector<DataPoint>>;

Pieces pieces_of(const LineChart& chart, const LineSeries& series) {
  Pieces pieces(1);
  for (size_t i = 0; i < std::min(series.x.size(), series.y.size()); ++i) {
    const double x = series.x[i];
    const double y = series.y[i];
    const bool drawn =
        is_plottable(x) && is_plottable(y) && (!chart.log_x || x > 0) && (!chart.log_y || y > 0);
    if (!drawn) {
      if (!pieces.back().empty()) pieces.emplace_back();
      continue;
    }
    const double deviation = i < series.deviations.size() ? series.deviations[i] : 0.0;
    pieces.back().push_back({x, y, is_plottable(deviation) ? std::abs(deviation) : 0});
  }
  return pieces;
}

struct LineExtent {
  std::set<double> xs;
  double low = INFINITY;
  double high = -INFINITY;
};

LineExtent extent_of(const LineChart& chart, const std::vector<Pieces>& all) {
  LineExtent extent;
  for (const auto& pieces : all) {
    for (const auto& piece : pieces) {
      for (const auto& point : piece) {
        extent.xs.insert(point.x);
        // The deviation of a non-negative value, such as a time or a size, does not go below 0.
        const double below =
            point.y >= 0 ? std::max(0.0, point.y - point.deviation) : point.y - point.deviation;
        extent.low = std::min(extent.low, chart.log_y && below <= 0 ? point.y : below);
        extent.high = std::max(extent.high, point.y + point.deviation);
      }
    }
  }
  return extent;
}

Axis x_axis(const LineChart& chart, const LineExtent& extent) {
  if (extent.xs.size() <= kMostPointTicks) {
    return point_axis({extent.xs.begin(), extent.xs.end()}, chart.log_x, Unit::kNumber);
  }
  const double low = *extent.xs.begin();
  const double high = *extent.xs.rbegin();
  if (chart.log_x) return log_axis(low, high, 2, Unit::kNumber);
  // The data reach from edge to edge; only the ticks are round.
  Axis axis = linear_axis(low, high, Unit::kNumber, 6);
  std::erase_if(axis.ticks,
                [&](const Tick& tick) { return tick.value < low || tick.value > high; });
  axis.low = low;
  axis.high = high;
  return axis;
}

Axis y_axis(const LineChart& chart, const LineExtent& extent) {
  if (chart.log_y) return log_axis(extent.low, extent.high, 10, chart.unit);
  const double low = chart.from_zero ? std::min(0.0, extent.low) : extent.low;
  const double high = chart.from_zero ? std::max(0.0, extent.high) : extent.high;
  return linear_axis(low, high, chart.unit, 4);
}

Dash dash_of(size_t series) {
  constexpr std::array kDashes = {Dash::kSolid, Dash::kDashed, Dash::kDotted, Dash::kDashDot};
  return kDashes.at(series % kDashes.size());
}

Stroke stroke_of(const LineSeries& series, size_t index, double font_size) {
  if (series.reference) {
    return {.colour = {Role::kMuted}, .width = font_size * 0.1, .dash = Dash::kDashed};
  }
  return {.colour = {Role::kPalette, static_cast<int>(index)},
          .width = font_size * 0.17,
          .dash = dash_of(index)};
}

// The plane of a chart, with the areas that are taken by points, whiskers and texts.
class Plane {
 public:
  Plane(Canvas& canvas, const LineChart& chart, Axis x, Axis y, const Box& plot, double font_size)
      : canvas_(canvas),
        chart_(chart),
        x_(std::move(x)),
        y_(std::move(y)),
        plot_(plot),
        font_size_(font_size) {}

  void draw_series(const LineSeries& series, size_t index, const Pieces& pieces) {
    size_t count = 0;
    for (const auto& piece : pieces) count += piece.size();
    const bool markers = !series.reference && count <= kMostMarkers;
    const double radius = font_size_ * 0.3;
    for (const auto& piece : pieces) {
      std::vector<Point> points;
      for (const auto& point : piece) points.push_back(position(point.x, point.y));
      if (points.size() > 1) canvas_.polyline(points, stroke_of(series, index, font_size_));
      for (size_t i = 1; i < points.size(); ++i) lines_.push_back({points[i - 1], points[i]});
      for (size_t i = 0; i < points.size(); ++i) {
        if (piece[i].deviation > 0 && count <= kMostMarkers)
          draw_deviation(piece[i], stroke_of(series, index, font_size_).colour);
        const bool alone = points.size() == 1 && !series.reference;  // or it would not be visible
        if (markers || alone) draw_marker(canvas_, points[i], static_cast<int>(index), radius);
        if (markers)
          taken_.push_back({points[i].x - radius, points[i].y - radius, 2 * radius, 2 * radius});
      }
    }
  }

  // Writes values beside the points, away from other texts, points and lines.
  void write_values(const Pieces& pieces) {
    const Font font{.size = font_size_ * 0.88};
    for (const auto& piece : pieces) {
      for (const auto& data : piece) write_value(data, font);
    }
  }

 private:
  Point position(double x, double y) const {
    // Points keep a distance from the sides.
    const double inset = plot_.width * 0.05;
    return {plot_.x + inset + x_.position(x) * (plot_.width - 2 * inset), y_of(y_, plot_, y)};
  }

  void draw_deviation(const DataPoint& point, Colour colour) {
    const double x = position(point.x, point.y).x;
    const double top = y_of(y_, plot_, point.y + point.deviation);
    const double bottom = y_of(y_, plot_, point.y - point.deviation);
    const double half = font_size_ * 0.3;
    draw_whisker(canvas_, x, top, bottom, half, colour);
    taken_.push_back({x - half, top, 2 * half, bottom - top});
  }

  void write_value(const DataPoint& data, const Font& font) {
    const std::string text = format_value(chart_.unit, data.y);
    const double width = text_width(text, font);
    const double x = position(data.x, data.y).x;
    const double above = position(data.x, data.y + data.deviation).y - font.size * 0.55;
    const double below = position(data.x, data.y - data.deviation).y + font.size * 1.3;
    const double aside = width / 2 + font.size * 0.5;
    const double beside = position(data.x, data.y).y + font.size * 0.36;
    const double further = font.size * 1.1;
    const std::array positions = {Point{x, above},           Point{x, below},
                                  Point{x - aside, above},   Point{x + aside, below},
                                  Point{x + aside, above},   Point{x - aside, below},
                                  Point{x + aside, beside},  Point{x - aside, beside},
                                  Point{x, above - further}, Point{x, below + further}};
    for (const bool strict : {true, false}) {  // better over a line than not at all
      for (const Point& at : positions) {
        const double left = std::clamp(at.x - width / 2, plot_.x, plot_.right() - width);
        const Box box{left, at.y - font.size * kAscent, width, font.size};
        if (!is_free(box) || (strict && is_crossed(box))) continue;
        taken_.push_back(box);
        canvas_.text({left, at.y}, text, {.font = font, .colour = {Role::kInk}});
        return;
      }
    }
  }

  // Whether a line of a series crosses the box.
  bool is_crossed(const Box& box) const {
    return std::any_of(lines_.begin(), lines_.end(), [&](const Segment& line) {
      constexpr int kSteps = 64;
      for (int i = 0; i <= kSteps; ++i) {
        const double t = static_cast<double>(i) / kSteps;
        const double x = line.from.x + t * (line.to.x - line.from.x);
        const double y = line.from.y + t * (line.to.y - line.from.y);
        if (x > box.x && x < box.right() && y > box.y && y < box.bottom()) return true;
      }
      return false;
    });
  }

  bool is_free(const Box& box) const {
    if (box.y < plot_.y - font_size_ * 1.3 || box.bottom() > plot_.bottom()) return false;
    return std::none_of(taken_.begin(), taken_.end(), [&](const Box& other) {
      return box.x < other.right() && other.x < box.right() && box.y < other.bottom() &&
             other.y < box.bottom();
    });
  }

  Canvas& canvas_;
  const LineChart& chart_;
  Axis x_;
  Axis y_;
  Box plot_;
  double font_size_;
  std::vector<Box> taken_;
  std::vector<Segment> lines_;  // of all series
};

std::vector<LegendEntry> legend_of(const LineChart& chart, double font_size) {
  std::vector<LegendEntry> legend;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const LineSeries& series = chart.series[i];
    legend.push_back(
        {series.name, [&series, i, font_size](Canvas& canvas, const Box& box) {
           const double y = box.y + box.height / 2;
           canvas.line({box.x, y}, {box.right(), y}, stroke_of(series, i, font_size));
           if (series.reference) return;
           draw_marker(canvas, {box.x + box.width / 2, y}, static_cast<int>(i), font_size * 0.28);
         }});
  }
  return legend;
}

}  // namespace

void draw_lines(Canvas& canvas, const LineChart& chart, const Box& box, double font_size) {
  std::vector<Pieces> all;  // [series]
  for (const auto& series : chart.series) all.push_back(pieces_of(chart, series));
  const LineExtent extent = extent_of(chart, all);
  Box rest = draw_title(canvas, chart.title, box, font_size);
  if (extent.xs.empty()) {
    draw_no_data(canvas, rest, font_size);
    return;
  }
  rest = draw_legend(canvas, legend_of(chart, font_size), rest, font_size);

  const Font font{.size = font_size};
  const Axis x = x_axis(chart, extent);
  const Axis y = y_axis(chart, extent);
  const double left = labels_width(y, font);
  const double above = font_size * 1.3;
  const double below = font_size * (chart.x_label.empty() ? 1.7 : 3.1);
  const Box plot{rest.x + left, rest.y + above, rest.width - left,
                 std::max(1.0, rest.height - above - below)};
  draw_value_axis(canvas, y, plot, font);
  const double inset = plot.width * 0.05;
  draw_bottom_labels(canvas, x, {plot.x + inset, plot.y, plot.width - 2 * inset, plot.height}, box,
                     font);
  if (!chart.x_label.empty()) {
    canvas.text({plot.x + plot.width / 2, plot.bottom() + font_size * 2.75},
                fit_text(chart.x_label, font, plot.width),
                {.font = font, .colour = {Role::kMuted}, .anchor = Anchor::kMiddle});
  }
  canvas.line({plot.x, plot.bottom()}, {plot.right(), plot.bottom()},
              {.colour = {Role::kInk}, .width = font_size * 0.08});

  Plane plane(canvas, chart, x, y, plot, font_size);
  size_t values = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    plane.draw_series(chart.series[i], i, all[i]);
    if (chart.series[i].reference) continue;
    for (const auto& piece : all[i]) values += piece.size();
  }
  if (values > kMostValues) return;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!chart.series[i].reference) plane.write_values(all[i]);
  }
}

}  // namespace lockstep
