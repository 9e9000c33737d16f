#pragma once

#include "report/canvas.hpp"
#include "report/chart.hpp"

namespace lockstep {

/// Draws a chart into the box, all of it inside; letters have that size. A chart without a number
/// that can be drawn says "no data".
void draw_chart(Canvas& canvas, const Chart& chart, const Box& box, double font_size);

void draw_bars(Canvas& canvas, const BarChart& chart, const Box& box, double font_size);
void draw_lines(Canvas& canvas, const LineChart& chart, const Box& box, double font_size);
void draw_timeline(Canvas& canvas, const Timeline& chart, const Box& box, double font_size);

/// Whether a chart needs the width of the page; others stand two side by side.
bool is_wide(const Chart& chart);

/// The height that becomes a chart of this width.
double chart_height(const Chart& chart, double width, double font_size);

const std::string& chart_title(const Chart& chart);

/// What a chart shows, number by number, for readers who cannot see it.
std::string describe_chart(const Chart& chart);

}  // namespace lockstep
