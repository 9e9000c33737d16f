#pragma once

#include <functional>
#include <string>
#include <vector>

#include "report/axis.hpp"
#include "report/canvas.hpp"

namespace lockstep {

struct LegendEntry {
  std::string name;
  std::function<void(Canvas&, const Box&)> swatch;  ///< draws the sample of that series
};

/// Writes the title into the top of the box; the rest of the box is returned.
Box draw_title(Canvas& canvas, const std::string& title, const Box& box, double font_size);

/// Writes the legend where there is more than one entry; the rest of the box is returned.
Box draw_legend(Canvas& canvas, const std::vector<LegendEntry>& entries, const Box& box,
                double font_size);

void draw_no_data(Canvas& canvas, const Box& box, double font_size);

/// The room that the labels of a vertical axis take.
double labels_width(const Axis& axis, const Font& font);

/// Lines across the plot with their labels to its left.
void draw_value_axis(Canvas& canvas, const Axis& axis, const Box& plot, const Font& font);

/// Labels under the plot, between the sides of `box`; those that would touch the one before are
/// left out.
void draw_bottom_labels(Canvas& canvas, const Axis& axis, const Box& plot, const Box& box,
                        const Font& font);

/// Where a value lies on a plot's vertical axis.
double y_of(const Axis& axis, const Box& plot, double value);

/// A filled bar that can be told from the others in grey also: each index has its own hatching.
void draw_hatched(Canvas& canvas, const Box& box, int index, double font_size);

/// A point of a line: disc, square, triangle, diamond by index.
void draw_marker(Canvas& canvas, Point at, int index, double radius);

/// The deviation around a value.
void draw_whisker(Canvas& canvas, double x, double top, double bottom, double half_width,
                  Colour colour);

}  // namespace lockstep
