#pragma once

#include <string>

#include "report/canvas.hpp"
#include "report/chart.hpp"

namespace lockstep {

/// Writes SVG elements with real text; colours are CSS classes, defined by svg_style().
class SvgCanvas final : public Canvas {
 public:
  void segments(std::span<const Segment> lines, const Stroke& stroke) override;
  void polyline(std::span<const Point> points, const Stroke& stroke) override;
  void polygon(std::span<const Point> corners, Colour fill) override;
  void rectangle(const Box& box, Colour fill) override;
  void circle(Point centre, double radius, Colour fill) override;
  void text(Point at, std::string_view utf8, const TextStyle& style) override;

  const std::string& elements() const { return elements_; }

 private:
  std::string elements_;
};

/// Text for HTML and SVG, in elements and in quoted attributes; control characters become spaces.
std::string escape_xml(std::string_view text);

/// How the classes look. The colours --ink, --muted, --grid and --paper must be defined.
std::string svg_style();

/// The definitions of those four, light and dark, for the element that `selector` names.
std::string colour_style(std::string_view selector);

/// Where an SVG will stand: inside a page that has the styles, or as a file of its own.
enum class SvgPlace { kInPage, kFile };

/// A figure's chart as one <svg> element with title and description; `id` is unique in its page.
std::string render_svg(const Chart& chart, const std::string& id, SvgPlace place);

}  // namespace lockstep
