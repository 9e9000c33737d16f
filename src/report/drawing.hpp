#pragma once

#include <string>
#include <variant>
#include <vector>

#include "report/canvas.hpp"

namespace lockstep {

/// A canvas that keeps what is drawn on it: a page that is laid out before it is written, and a
/// page whose marks can be looked at.
class Drawing final : public Canvas {
 public:
  struct Segments {
    std::vector<Segment> lines;
    Stroke stroke;
  };
  struct Polyline {
    std::vector<Point> points;
    Stroke stroke;
  };
  struct Polygon {
    std::vector<Point> corners;
    Colour fill;
  };
  struct Rectangle {
    Box box;
    Colour fill;
  };
  struct Circle {
    Point centre;
    double radius;
    Colour fill;
  };
  struct Text {
    Point at;
    std::string utf8;
    TextStyle style;
  };
  using Mark = std::variant<Segments, Polyline, Polygon, Rectangle, Circle, Text>;

  void segments(std::span<const Segment> lines, const Stroke& stroke) override;
  void polyline(std::span<const Point> points, const Stroke& stroke) override;
  void polygon(std::span<const Point> corners, Colour fill) override;
  void rectangle(const Box& box, Colour fill) override;
  void circle(Point centre, double radius, Colour fill) override;
  void text(Point at, std::string_view utf8, const TextStyle& style) override;

  const std::vector<Mark>& marks() const { return marks_; }

  /// Draws the same marks in the same order.
  void replay(Canvas& canvas) const;

 private:
  std::vector<Mark> marks_;
};

/// The smallest box around a mark, from the corners of its letters and lines.
Box bounds_of(const Drawing::Mark& mark);

}  // namespace lockstep
