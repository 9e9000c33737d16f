#include "report/canvas.hpp"

namespace lockstep {

size_t palette_index(int index) {
  constexpr auto kSize = static_cast<int>(kPalette.size());
  const int rest = index % kSize;
  return static_cast<size_t>(rest < 0 ? rest + kSize : rest);
}

void Canvas::line(Point from, Point to, const Stroke& stroke) {
  segments(std::array{Segment{from, to}}, stroke);
}

}  // namespace lockstep
