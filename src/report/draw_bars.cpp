#include <algorithm>
#include <cmath>

#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

// The positions of the bars of a chart.
struct BarPositions {
  Box plot;
  double slot = 0;     // width of one category
  double width = 0;    // of one bar
  double between = 0;  // gap between bars of one category

  double centre(size_t category) const {
    return plot.x + (static_cast<double>(category) + 0.5) * slot;
  }
  double left(size_t category, size_t series, size_t count) const {
    const double group =
        static_cast<double>(count) * width + static_cast<double>(count - 1) * between;
    return centre(category) - group / 2 + static_cast<double>(series) * (width + between);
  }
};

double value_of(const BarSeries& series, size_t category) {
  return category < series.values.size() ? series.values[category] : std::nan("");
}

double deviation_of(const BarSeries& series, size_t category) {
  const double deviation = category < series.deviations.size() ? series.deviations[category] : 0.0;
  return is_plottable(deviation) ? std::abs(deviation) : 0;
}

// The height of a part of a stack: 0 unless the value is positive.
double part_of(const BarSeries& series, size_t category) {
  const double value = value_of(series, category);
  return is_plottable(value) && value > 0 ? value : 0;
}

double stack_total(const BarChart& chart, size_t category) {
  double total = 0;
  for (const auto& series : chart.series) total += part_of(series, category);
  return total;
}

bool has_part(const BarChart& chart, const BarSeries& series) {
  for (size_t category = 0; category < chart.categories.size(); ++category) {
    if (part_of(series, category) > 0) return true;
  }
  return false;
}

struct BarExtent {
  double low = 0;
  double high = 0;
  bool any = false;
};

BarExtent extent_of(const BarChart& chart) {
  BarExtent extent;
  for (size_t category = 0; category < chart.categories.size(); ++category) {
    if (chart.stacked) extent.high = std::max(extent.high, stack_total(chart, category));
    for (const auto& series : chart.series) {
      const double value = value_of(series, category);
      if (!is_plottable(value)) continue;
      extent.any = true;
      if (chart.stacked) continue;
      extent.low = std::min(extent.low, value < 0 ? value - deviation_of(series, category) : value);
      extent.high = std::max(extent.high, value + deviation_of(series, category));
    }
  }
  return extent;
}

// The lines of each category's label; empty if one of them does not fit under its slot.
std::vector<std::vector<std::string>> upright_labels(const BarChart& chart, const Font& font,
                                                     double slot) {
  constexpr size_t kLines = 3;
  std::vector<std::vector<std::string>> labels;
  for (const auto& category : chart.categories) {
    if (widest_word(category, font) > slot) return {};
    labels.push_back(wrap_lines(category, font, slot));
    if (labels.back().size() > kLines) return {};
  }
  return labels;
}

constexpr double kSlope = 40;  // degrees, for labels that do not fit upright
constexpr double kSlopeSine = 0.643;
constexpr double kSlopeCosine = 0.766;

// The labels under the plot, upright or sloping. They take `room` below it.
class CategoryLabels {
 public:
  CategoryLabels(const BarChart& chart, const Font& font, double slot, double box_height)
      : chart_(chart), font_(font), upright_(upright_labels(chart, font, slot * 0.94)) {
    size_t lines = 1;
    for (const auto& label : upright_) lines = std::max(lines, label.size());
    room_ = font.size * (0.5 + 1.2 * static_cast<double>(lines));
    if (!upright_.empty()) return;
    longest_ = 0;
    for (const auto& name : chart.categories) {
      longest_ = std::max(longest_, text_width(name, font));
    }
    longest_ = std::min(longest_, box_height * 0.3 / kSlopeSine);
    room_ = longest_ * kSlopeSine + font.size * 1.4;
  }

  double room() const { return room_; }

  void draw(Canvas& canvas, const BarPositions& positions, double left_edge, double y) const {
    double free_from = left_edge - font_.size;
    for (size_t i = 0; i < chart_.categories.size(); ++i) {
      const double x = positions.centre(i);
      if (!upright_.empty()) {
        for (size_t line = 0; line < upright_[i].size(); ++line) {
          const double below = font_.size * (1.25 + 1.2 * static_cast<double>(line));
          canvas.text({x, y + below}, upright_[i][line],
                      {.font = font_, .colour = {Role::kMuted}, .anchor = Anchor::kMiddle});
        }
        continue;
      }
      if (x < free_from) continue;  // sloping labels this close would overlap
      const double length = std::min(longest_, (x - font_.size * 0.6 - left_edge) / kSlopeCosine);
      canvas.text(
          {x + font_.size * 0.3, y + font_.size * 0.95},
          fit_text(chart_.categories[i], font_, length),
          {.font = font_, .colour = {Role::kMuted}, .anchor = Anchor::kEnd, .rotation = -kSlope});
      free_from = x + font_.size * 1.6;
    }
  }

 private:
  const BarChart& chart_;
  Font font_;
  std::vector<std::vector<std::string>> upright_;  // [category][line]
  double longest_ = 0;
  double room_ = 0;
};

// The values written above each bar or stack.
class BarTexts {
 public:
  // Each text has `room`. If they do not fit, the letters become smaller; then the unit, if all
  // share it, is left to the axis; then texts stand upright, no longer than `most_height`.
  BarTexts(const BarChart& chart, double room, double most_height, double font_size)
      : unit_(chart.unit) {
    std::vector<std::string> texts;
    for (size_t category = 0; category < chart.categories.size(); ++category) {
      if (chart.stacked) texts.push_back(of(stack_total(chart, category)));
      if (chart.stacked) continue;
      for (const auto& series : chart.series) texts.push_back(of(value_of(series, category)));
    }
    for (const bool bare : {false, true}) {
      if (bare && !share_unit(texts)) break;
      bare_ = bare;
      double widest = 0;
      for (const auto& text : texts) {
        widest = std::max(widest, text_width(bare ? number_of(text) : text, {.size = 1}));
      }
      for (const double size : {font_size * 0.92, font_size * 0.82}) {
        if (widest * size > room) continue;
        font_.size = size;
        height_ = font_size * 1.3;
        return;
      }
    }
    bare_ = share_unit(texts);
    upright_ = true;
    font_.size = font_size * 0.82;
    double longest = 0;
    for (const auto& text : texts) {
      longest = std::max(longest, text_width(bare_ ? number_of(text) : text, font_));
    }
    height_ = longest + font_.size * 0.7;
    if (font_.size > room || height_ > most_height) font_.size = height_ = 0;
  }

  // The height that the texts take above or below their bars.
  double height() const { return height_; }

  void write(Canvas& canvas, Point at, double value, bool below = false) const {
    const std::string text = bare_ ? number_of(of(value)) : of(value);
    if (font_.size == 0 || text.empty()) return;
    if (upright_) {
      canvas.text({at.x + font_.size * 0.36, at.y + font_.size * (below ? 0.35 : -0.35)}, text,
                  {.font = font_,
                   .colour = {Role::kInk},
                   .anchor = below ? Anchor::kEnd : Anchor::kStart,
                   .rotation = -90});
      return;
    }
    const double y = below ? at.y + font_.size * 1.1 : at.y - font_.size * 0.35;
    canvas.text({at.x, y}, text,
                {.font = font_, .colour = {Role::kInk}, .anchor = Anchor::kMiddle});
  }

 private:
  std::string of(double value) const {
    return is_plottable(value) ? format_value(unit_, value) : "";
  }
  static std::string number_of(const std::string& text) { return text.substr(0, text.find(' ')); }

  static bool share_unit(const std::vector<std::string>& texts) {
    std::string unit;
    for (const auto& text : texts) {
      if (text.empty()) continue;
      const std::string own = text.substr(std::min(text.find(' '), text.size()));
      if (!unit.empty() && own != unit) return false;
      unit = own;
    }
    return true;
  }

  Unit unit_;
  Font font_;
  double height_ = 0;
  bool bare_ = false;
  bool upright_ = false;
};

void draw_grouped(Canvas& canvas, const BarChart& chart, const Axis& axis,
                  const BarPositions& positions, const BarTexts& texts, double font_size) {
  const double zero = y_of(axis, positions.plot, 0);
  for (size_t s = 0; s < chart.series.size(); ++s) {
    for (size_t category = 0; category < chart.categories.size(); ++category) {
      const double value = value_of(chart.series[s], category);
      if (!is_plottable(value)) continue;
      const double deviation = deviation_of(chart.series[s], category);
      const double end = y_of(axis, positions.plot, value);
      const double left = positions.left(category, s, chart.series.size());
      const double middle = left + positions.width / 2;
      draw_hatched(canvas, {left, std::min(end, zero), positions.width, std::abs(end - zero)},
                   static_cast<int>(s), font_size);
      const bool hangs = value < 0;
      double reach = end;  // the end of bar and whisker
      if (deviation > 0) {
        const double high = y_of(axis, positions.plot, value + deviation);
        const double low = y_of(axis, positions.plot, value - deviation);
        draw_whisker(canvas, middle, high, low, std::min(positions.width * 0.2, font_size * 0.4),
                     {Role::kInk});
        reach = hangs ? low : high;
      }
      texts.write(canvas, {middle, reach}, value, hangs);
    }
  }
}

void draw_stacks(Canvas& canvas, const BarChart& chart, const Axis& axis,
                 const BarPositions& positions, const BarTexts& texts, double font_size) {
  for (size_t category = 0; category < chart.categories.size(); ++category) {
    const double middle = positions.centre(category);
    double below = 0;
    for (size_t s = 0; s < chart.series.size(); ++s) {
      const double part = part_of(chart.series[s], category);
      if (part <= 0) continue;
      const double top = y_of(axis, positions.plot, below + part);
      const double bottom = y_of(axis, positions.plot, below);
      below += part;
      draw_hatched(canvas, {middle - positions.width / 2, top, positions.width, bottom - top},
                   static_cast<int>(s), font_size);
      const std::string text = format_value(chart.unit, part);
      const Font inside{.size = font_size * 0.85};
      const double width = text_width(text, inside) + inside.size * 0.7;
      if (width > positions.width || bottom - top < inside.size * 1.7) continue;
      const double y = (top + bottom) / 2;
      canvas.rectangle({middle - width / 2, y - inside.size * 0.62, width, inside.size * 1.24},
                       {Role::kPaper});
      canvas.text({middle, y + inside.size * 0.36}, text,
                  {.font = inside, .colour = {Role::kInk}, .anchor = Anchor::kMiddle});
    }
    if (below > 0) texts.write(canvas, {middle, y_of(axis, positions.plot, below)}, below);
  }
}

BarPositions position_bars(const BarChart& chart, const Box& plot, double font_size) {
  BarPositions positions{.plot = plot};
  const auto bars = static_cast<double>(chart.stacked ? 1 : chart.series.size());
  positions.slot = plot.width / static_cast<double>(chart.categories.size());
  positions.between = std::min(font_size * 0.25, positions.slot * 0.03);
  const double room = positions.slot * (chart.stacked ? 0.62 : 0.78);
  positions.width = std::min((room - (bars - 1) * positions.between) / bars,
                             font_size * (chart.stacked ? 6.5 : 5.5));
  return positions;
}

}  // namespace

void draw_bars(Canvas& canvas, const BarChart& chart, const Box& box, double font_size) {
  const BarExtent extent = extent_of(chart);
  Box rest = draw_title(canvas, chart.title, box, font_size);
  if (!extent.any) {
    draw_no_data(canvas, rest, font_size);
    return;
  }
  std::vector<LegendEntry> legend;
  for (size_t s = 0; s < chart.series.size(); ++s) {
    if (chart.stacked && !has_part(chart, chart.series[s])) continue;
    legend.push_back({chart.series[s].name, [s, font_size](Canvas& on, const Box& swatch) {
                        draw_hatched(on, swatch, static_cast<int>(s), font_size);
                      }});
  }
  rest = draw_legend(canvas, legend, rest, font_size);

  const Font font{.size = font_size};
  const Axis axis = linear_axis(extent.low, extent.high, chart.unit, 4);
  const double left = labels_width(axis, font);
  const double slot = (rest.width - left) / static_cast<double>(chart.categories.size());
  const CategoryLabels labels(chart, font, slot, rest.height);
  Box plot{rest.x + left, rest.y, rest.width - left, 0};
  BarPositions positions = position_bars(chart, plot, font_size);
  const double room = chart.stacked ? slot * 0.95 : positions.width + positions.between * 0.5;
  const BarTexts texts(chart, room, rest.height * 0.3, font_size);
  // Room for a value above a bar that reaches the top, and below one that hangs.
  const double above = std::max(texts.height(), font_size * 0.6);
  const double hanging = extent.low < 0 ? texts.height() : 0;
  plot.y += above;
  plot.height = std::max(1.0, rest.height - above - hanging - labels.room());
  positions.plot = plot;
  draw_value_axis(canvas, axis, plot, font);
  if (chart.stacked) {
    draw_stacks(canvas, chart, axis, positions, texts, font_size);
  } else {
    draw_grouped(canvas, chart, axis, positions, texts, font_size);
  }
  const double zero = y_of(axis, plot, 0);
  canvas.line({plot.x, zero}, {plot.right(), zero},
              {.colour = {Role::kInk}, .width = font_size * 0.08});
  labels.draw(canvas, positions, box.x, plot.bottom() + hanging);
}

}  // namespace lockstep
