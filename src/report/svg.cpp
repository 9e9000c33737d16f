#include "report/svg.hpp"

#include <fmt/format.h>

#include <span>

#include "base/utf8.hpp"
#include "report/draw_chart.hpp"

namespace lockstep {
namespace {

constexpr double kNarrowSvg = 480;
constexpr double kWideSvg = 980;
constexpr double kSvgFont = 12;

// "12.5", "3", "-0.25". Two decimals are more precise than a screen.
std::string svg_number(double value) {
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string class_of(Colour colour) {
  switch (colour.role) {
    case Role::kInk:
      return "ink";
    case Role::kMuted:
      return "muted";
    case Role::kGrid:
      return "grid";
    case Role::kPaper:
      return "paper";
    case Role::kPalette:
      return fmt::format("c{}", palette_index(colour.index));
    case Role::kOnPalette:
      break;
  }
  return palette_index(colour.index) == 0 ? "light" : "dark";
}

std::string stroke_attributes(const Stroke& stroke) {
  std::string text = fmt::format("class=\"l s-{}\" stroke-width=\"{}\"", class_of(stroke.colour),
                                 svg_number(stroke.width));
  const double w = stroke.width;
  if (stroke.dash == Dash::kDashed) {
    text += fmt::format(" stroke-dasharray=\"{} {}\"", svg_number(4 * w), svg_number(2.5 * w));
  } else if (stroke.dash == Dash::kDotted) {
    text += fmt::format(" stroke-dasharray=\"{} {}\"", svg_number(1.2 * w), svg_number(1.8 * w));
  } else if (stroke.dash == Dash::kDashDot) {
    text += fmt::format(" stroke-dasharray=\"{0} {1} {2} {1}\"", svg_number(5 * w),
                        svg_number(2 * w), svg_number(1.2 * w));
  }
  return text;
}

std::string point_list(std::span<const Point> points) {
  std::string text;
  for (const auto& [x, y] : points) {
    if (!text.empty()) text += ' ';
    text += svg_number(x) + "," + svg_number(y);
  }
  return text;
}

// Writes SVG elements with real text. Colours are CSS classes, which svg_style() defines.
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

void SvgCanvas::segments(std::span<const Segment> lines, const Stroke& stroke) {
  std::string path;
  for (const auto& [from, to] : lines) {
    path += fmt::format("M{} {}L{} {}", svg_number(from.x), svg_number(from.y), svg_number(to.x),
                        svg_number(to.y));
  }
  elements_ += fmt::format("<path {} d=\"{}\"/>\n", stroke_attributes(stroke), path);
}

void SvgCanvas::polyline(std::span<const Point> points, const Stroke& stroke) {
  elements_ +=
      fmt::format("<polyline {} points=\"{}\"/>\n", stroke_attributes(stroke), point_list(points));
}

void SvgCanvas::polygon(std::span<const Point> corners, Colour fill) {
  elements_ +=
      fmt::format("<polygon class=\"{}\" points=\"{}\"/>\n", class_of(fill), point_list(corners));
}

void SvgCanvas::rectangle(const Box& box, Colour fill) {
  elements_ += fmt::format(R"(<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>)"
                           "\n",
                           class_of(fill), svg_number(box.x), svg_number(box.y),
                           svg_number(box.width), svg_number(box.height));
}

void SvgCanvas::circle(Point centre, double radius, Colour fill) {
  elements_ +=
      fmt::format(R"(<circle class="{}" cx="{}" cy="{}" r="{}"/>)"
                  "\n",
                  class_of(fill), svg_number(centre.x), svg_number(centre.y), svg_number(radius));
}

void SvgCanvas::text(Point at, std::string_view utf8, const TextStyle& style) {
  std::string classes = class_of(style.colour);
  if (style.font.bold) classes += " b";
  if (style.font.mono) classes += " mono";
  std::string more;
  if (style.anchor != Anchor::kStart) {
    more += fmt::format(" text-anchor=\"{}\"", style.anchor == Anchor::kEnd ? "end" : "middle");
  }
  if (style.rotation != 0) {
    more += fmt::format(" transform=\"rotate({} {} {})\"", svg_number(style.rotation),
                        svg_number(at.x), svg_number(at.y));
  }
  elements_ += fmt::format(R"(<text class="{}" x="{}" y="{}" font-size="{}"{}>{}</text>)"
                           "\n",
                           classes, svg_number(at.x), svg_number(at.y), svg_number(style.font.size),
                           more, escape_xml(utf8));
}

}  // namespace

std::string escape_xml(std::string_view text) {
  std::string escaped;
  for (const char c : clean_text(text)) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string svg_style() {
  std::string style =
      "svg text{font-family:'DejaVu Sans',Verdana,sans-serif}svg .b{font-weight:bold}"
      "svg .mono{font-family:'DejaVu Sans Mono',monospace}svg .l{fill:none}"
      "svg .light{fill:#fff}svg .dark{fill:#111}";
  for (const char* role : {"ink", "muted", "grid", "paper"}) {
    style += fmt::format("svg .{0}{{fill:var(--{0})}}svg .s-{0}{{stroke:var(--{0})}}", role);
  }
  for (size_t i = 0; i < kPalette.size(); ++i) {
    style +=
        fmt::format("svg .c{0}{{fill:#{1:06x}}}svg .s-c{0}{{stroke:#{1:06x}}}", i, kPalette.at(i));
  }
  return style;
}

std::string colour_style(std::string_view selector) {
  return fmt::format(
      "{0}{{--ink:#1b1f24;--muted:#59636e;--grid:#d8dde3;--paper:#ffffff}}"
      "@media screen and (prefers-color-scheme:dark){{"
      "{0}{{--ink:#e8eaed;--muted:#a5adb6;--grid:#3a4149;--paper:#16191d}}}}",
      selector);
}

std::string render_svg(const Chart& chart, const std::string& id, SvgTarget target) {
  const double width = is_wide(chart) ? kWideSvg : kNarrowSvg;
  const double height = chart_height(chart, width, kSvgFont);
  SvgCanvas canvas;
  canvas.rectangle({0, 0, width, height}, {Role::kPaper});
  constexpr double kMargin = 4;
  draw_chart(canvas, chart, {kMargin, kMargin, width - 2 * kMargin, height - 2 * kMargin},
             kSvgFont);
  const bool file = target == SvgTarget::kFile;
  std::string svg = fmt::format(
      R"(<svg{0} viewBox="0 0 {1} {2}" role="img" aria-labelledby="{3}-title {3}-desc"{4}>)"
      "\n<title id=\"{3}-title\">{5}</title>\n<desc id=\"{3}-desc\">{6}</desc>\n",
      file ? " xmlns=\"http://www.w3.org/2000/svg\"" : "", svg_number(width), svg_number(height),
      escape_xml(id),
      file ? fmt::format(" width=\"{}\" height=\"{}\"", svg_number(width), svg_number(height)) : "",
      escape_xml(chart_title(chart)), escape_xml(describe_chart(chart)));
  if (file) svg += "<style>" + colour_style("svg") + svg_style() + "</style>\n";
  return svg + canvas.elements() + "</svg>\n";
}

}  // namespace lockstep
