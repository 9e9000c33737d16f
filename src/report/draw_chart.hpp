#pragma once

#include <functional>
#include <string>
#include <vector>

#include "report/axis.hpp"
#include "report/canvas.hpp"
#include "report/chart.hpp"

namespace lockstep {

/// Draws a chart inside the box with letters of the given size. A chart without a number that can
/// be drawn says "no data".
void draw_chart(Canvas& canvas, const Chart& chart, const Box& box, double font_size);

/// Whether a chart takes the width of the page. Two others stand side by side.
bool is_wide(const Chart& chart);

/// A suitable height for a chart of this width.
double chart_height(const Chart& chart, double width, double font_size);

const std::string& chart_title(const Chart& chart);

/// Describes a chart number by number, for readers who cannot see it.
std::string describe_chart(const Chart& chart);

// Kinds of charts, and the parts that they share.

void draw_bars(Canvas& canvas, const BarChart& chart, const Box& box, double font_size);
void draw_lines(Canvas& canvas, const LineChart& chart, const Box& box, double font_size);
void draw_timeline(Canvas& canvas, const Timeline& chart, const Box& box, double font_size);

struct LegendEntry {
  std::string name;
  std::function<void(Canvas&, const Box&)> swatch;  ///< draws the sample of the series
};

/// Writes the title at the top of the box. Returns the rest of the box.
Box draw_title(Canvas& canvas, const std::string& title, const Box& box, double font_size);

/// Writes the legend if there is more than one entry. Returns the rest of the box.
Box draw_legend(Canvas& canvas, const std::vector<LegendEntry>& entries, const Box& box,
                double font_size);

void draw_no_data(Canvas& canvas, const Box& box, double font_size);

/// The width that the labels of a vertical axis take.
double labels_width(const Axis& axis, const Font& font);

/// Draws lines across the plot with their labels to its left.
void draw_value_axis(Canvas& canvas, const Axis& axis, const Box& plot, const Font& font);

/// Writes labels under the plot, between the sides of `box`. Leaves out a label that would touch
/// the previous one.
void draw_bottom_labels(Canvas& canvas, const Axis& axis, const Box& plot, const Box& box,
                        const Font& font);

/// The position of a value on a plot's vertical axis.
double y_of(const Axis& axis, const Box& plot, double value);

/// Draws a bar. Each index has its own hatching, so that bars differ in a grey print too.
void draw_hatched(Canvas& canvas, const Box& box, int index, double font_size);

/// Draws a point of a line: a disc, square, triangle or diamond, depending on the index.
void draw_marker(Canvas& canvas, Point at, int index, double radius);

/// Draws the deviation around a value.
void draw_whisker(Canvas& canvas, double x, double top, double bottom, double half_width,
                  Colour colour);

}  // namespace lockstep
