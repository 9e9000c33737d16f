#include "report/flow.hpp"

#include <algorithm>

namespace lockstep {
namespace {

// How many of a paragraph's first lines stay together: two, or three where one would be left.
double lead_of(size_t lines) {
  return static_cast<double>(lines == 3 ? 3 : std::min<size_t>(lines, 2));
}

}  // namespace

void Flow::new_page() {
  pages_.emplace_back();
  y_ = body_.y;
}

void Flow::need(double height) {
  if (!fits(height) && !at_top()) new_page();
}

void Flow::space(double height) {
  if (!at_top()) y_ += height;
}

void Flow::line(const std::string& text, const Setting& setting, double indent) {
  need(setting.leading);
  const double baseline =
      y_ + (setting.leading - setting.font.size) / 2 + kAscent * setting.font.size;
  page().text({body_.x + indent, baseline}, text, {.font = setting.font, .colour = setting.colour});
  y_ += setting.leading;
}

void Flow::paragraph(const std::string& text, const Setting& setting) {
  const auto lines = wrap_lines(text, setting.font, body_.width);
  need(lead_of(lines.size()) * setting.leading);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines.size() - i == 2) need(2 * setting.leading);
    line(lines[i], setting);
  }
}

void Flow::rule(double thickness, Colour colour) {
  page().line({body_.x, y_}, {body_.x + body_.width, y_}, {.colour = colour, .width = thickness});
}

double set_height(const std::string& text, const Setting& setting, double width) {
  return static_cast<double>(wrap_lines(text, setting.font, width).size()) * setting.leading;
}

double lead_height(const std::string& text, const Setting& setting, double width) {
  return lead_of(wrap_lines(text, setting.font, width).size()) * setting.leading;
}

}  // namespace lockstep
