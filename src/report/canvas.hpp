#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "report/text.hpp"

namespace lockstep {

struct Point {
  double x = 0;
  double y = 0;  ///< downwards
};

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;

  double right() const { return x + width; }
  double bottom() const { return y + height; }
};

struct Segment {
  Point from;
  Point to;
};

/// What a colour is for. The canvas decides how it looks on a screen, in dark mode and in print.
enum class Role {
  kInk,
  kMuted,
  kGrid,
  kPaper,
  kPalette,   ///< the colour of one series
  kOnPalette  ///< text on that colour
};

struct Colour {
  Role role = Role::kInk;
  int index = 0;  ///< in the palette, which repeats
};

/// The colours of Okabe and Ito, which colour-blind readers can distinguish, as 0xRRGGBB. Text is
/// white on the first and black on the others.
inline constexpr std::array<uint32_t, 7> kPalette = {0x0072B2, 0xE69F00, 0x009E73, 0xCC79A7,
                                                     0x56B4E9, 0xD55E00, 0xF0E442};

/// Maps any index to one of the palette.
constexpr size_t palette_index(int index) {
  constexpr auto kSize = static_cast<int>(kPalette.size());
  const int rest = index % kSize;
  return static_cast<size_t>(rest < 0 ? rest + kSize : rest);
}

enum class Dash { kSolid, kDashed, kDotted, kDashDot };

struct Stroke {
  Colour colour;
  double width = 1;
  Dash dash = Dash::kSolid;
};

enum class Anchor { kStart, kMiddle, kEnd };

struct TextStyle {
  Font font;
  Colour colour;
  Anchor anchor = Anchor::kStart;
  double rotation = 0;  ///< degrees clockwise, about the point of the text
};

/// What charts and pages are drawn on. All canvases measure text with text_width.
class Canvas {
 public:
  Canvas() = default;
  Canvas(const Canvas&) = default;
  Canvas& operator=(const Canvas&) = default;
  Canvas(Canvas&&) = default;
  Canvas& operator=(Canvas&&) = default;
  virtual ~Canvas() = default;

  virtual void segments(std::span<const Segment> lines, const Stroke& stroke) = 0;
  virtual void polyline(std::span<const Point> points, const Stroke& stroke) = 0;
  virtual void polygon(std::span<const Point> corners, Colour fill) = 0;
  virtual void rectangle(const Box& box, Colour fill) = 0;
  virtual void circle(Point centre, double radius, Colour fill) = 0;
  /// `at` is the start, middle or end of the baseline, depending on the anchor.
  virtual void text(Point at, std::string_view utf8, const TextStyle& style) = 0;

  void line(Point from, Point to, const Stroke& stroke) {
    segments(std::array{Segment{from, to}}, stroke);
  }
};

/// A canvas that records what is drawn on it: a page that is laid out before it is written, or
/// whose marks a test examines.
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

  /// A part of the page that leads to a file beside the document.
  struct Link {
    Box box;
    std::string path;
  };
  /// A place that a viewer lists beside the pages.
  struct Bookmark {
    double y;
    std::string title;
    int level;  ///< 0: a section, 1: a part of it
  };

  void link(const Box& box, std::string path) { links_.push_back({box, std::move(path)}); }
  void bookmark(double y, std::string title, int level) {
    bookmarks_.push_back({y, std::move(title), level});
  }
  const std::vector<Link>& links() const { return links_; }
  const std::vector<Bookmark>& bookmarks() const { return bookmarks_; }

 private:
  std::vector<Mark> marks_;
  std::vector<Link> links_;
  std::vector<Bookmark> bookmarks_;
};

/// The smallest box around a mark.
Box bounds_of(const Drawing::Mark& mark);

/// A visitor of a variant, made of one lambda for each alternative.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace lockstep
