#include "report/canvas.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace lockstep {
namespace {

// A box that grows with every point and is empty before the first.
class Hull {
 public:
  void add(Point point, double margin = 0) {
    left_ = std::min(left_, point.x - margin);
    right_ = std::max(right_, point.x + margin);
    top_ = std::min(top_, point.y - margin);
    bottom_ = std::max(bottom_, point.y + margin);
  }

  Box box() const {
    if (left_ > right_) return {};
    return {left_, top_, right_ - left_, bottom_ - top_};
  }

 private:
  static constexpr double kFar = std::numeric_limits<double>::infinity();
  double left_ = kFar;
  double right_ = -kFar;
  double top_ = kFar;
  double bottom_ = -kFar;
};

Box text_bounds(const Drawing::Text& text) {
  const double width = text_width(text.utf8, text.style.font);
  double left = 0;
  if (text.style.anchor == Anchor::kMiddle) left = -width / 2;
  if (text.style.anchor == Anchor::kEnd) left = -width;
  const double angle = text.style.rotation * std::numbers::pi / 180;
  Hull hull;
  for (const double x : {left, left + width}) {
    for (const double y : {-kAscent * text.style.font.size, kDescent * text.style.font.size}) {
      hull.add({text.at.x + x * std::cos(angle) - y * std::sin(angle),
                text.at.y + x * std::sin(angle) + y * std::cos(angle)});
    }
  }
  return hull.box();
}

}  // namespace

void Drawing::segments(std::span<const Segment> lines, const Stroke& stroke) {
  marks_.push_back(Segments{{lines.begin(), lines.end()}, stroke});
}

void Drawing::polyline(std::span<const Point> points, const Stroke& stroke) {
  marks_.push_back(Polyline{{points.begin(), points.end()}, stroke});
}

void Drawing::polygon(std::span<const Point> corners, Colour fill) {
  marks_.push_back(Polygon{{corners.begin(), corners.end()}, fill});
}

void Drawing::rectangle(const Box& box, Colour fill) {
  marks_.push_back(Rectangle{box, fill});
}

void Drawing::circle(Point centre, double radius, Colour fill) {
  marks_.push_back(Circle{centre, radius, fill});
}

void Drawing::text(Point at, std::string_view utf8, const TextStyle& style) {
  marks_.push_back(Text{at, std::string(utf8), style});
}

void Drawing::replay(Canvas& canvas) const {
  for (const Mark& mark : marks_) {
    std::visit(Overloaded{
                   [&](const Segments& it) { canvas.segments(it.lines, it.stroke); },
                   [&](const Polyline& it) { canvas.polyline(it.points, it.stroke); },
                   [&](const Polygon& it) { canvas.polygon(it.corners, it.fill); },
                   [&](const Rectangle& it) { canvas.rectangle(it.box, it.fill); },
                   [&](const Circle& it) { canvas.circle(it.centre, it.radius, it.fill); },
                   [&](const Text& it) { canvas.text(it.at, it.utf8, it.style); },
               },
               mark);
  }
}

Box bounds_of(const Drawing::Mark& mark) {
  Hull hull;
  std::visit(Overloaded{
                 [&](const Drawing::Segments& it) {
                   for (const auto& [from, to] : it.lines) {
                     hull.add(from, it.stroke.width / 2);
                     hull.add(to, it.stroke.width / 2);
                   }
                 },
                 [&](const Drawing::Polyline& it) {
                   for (const Point& point : it.points) hull.add(point, it.stroke.width / 2);
                 },
                 [&](const Drawing::Polygon& it) {
                   for (const Point& corner : it.corners) hull.add(corner);
                 },
                 [&](const Drawing::Rectangle& it) {
                   hull.add({it.box.x, it.box.y});
                   hull.add({it.box.right(), it.box.bottom()});
                 },
                 [&](const Drawing::Circle& it) { hull.add(it.centre, it.radius); },
                 [&](const Drawing::Text& it) {
                   const Box box = text_bounds(it);
                   hull.add({box.x, box.y});
                   hull.add({box.right(), box.bottom()});
                 },
             },
             mark);
  return hull.box();
}

}  // namespace lockstep
