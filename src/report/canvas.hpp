#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

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

/// What a colour is for. The canvas knows how it looks: on a screen, in the dark, in print.
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
  int index = 0;  ///< of the palette; any number, the palette begins again after its last
};

/// Okabe and Ito's colours, told apart by colour-blind readers, as 0xRRGGBB. On the first, letters
/// are white; on the others, black.
inline constexpr std::array<uint32_t, 7> kPalette = {0x0072B2, 0xE69F00, 0x009E73, 0xCC79A7,
                                                     0x56B4E9, 0xD55E00, 0xF0E442};

/// Any index as one of the palette.
size_t palette_index(int index);

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
  double rotation = 0;  ///< degrees, clockwise about the text's own point
};

/// What charts and pages are drawn on. Text is measured with text_width, alike for all canvases.
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
  /// `at` is on the baseline: begin, middle or end of the text by its anchor.
  virtual void text(Point at, std::string_view utf8, const TextStyle& style) = 0;

  void line(Point from, Point to, const Stroke& stroke);
};

}  // namespace lockstep
