#pragma once

#include "report/cairo_handle.hpp"
#include "report/canvas.hpp"

namespace lockstep {

/// Draws with Cairo, in the colours of print.
class CairoCanvas final : public Canvas {
 public:
  /// The context must outlive the canvas.
  explicit CairoCanvas(cairo_t* context) : context_(context) {}

  void segments(std::span<const Segment> lines, const Stroke& stroke) override;
  void polyline(std::span<const Point> points, const Stroke& stroke) override;
  void polygon(std::span<const Point> corners, Colour fill) override;
  void rectangle(const Box& box, Colour fill) override;
  void circle(Point centre, double radius, Colour fill) override;
  void text(Point at, std::string_view utf8, const TextStyle& style) override;

 private:
  void set_colour(Colour colour);
  void stroke_path(const Stroke& stroke);

  cairo_t* context_;
};

}  // namespace lockstep
