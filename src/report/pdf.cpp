#include <cairo/cairo-pdf.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <array>
#include <numbers>

#include "base/utf8.hpp"
#include "lockstep/error.hpp"
#include "report/cairo.hpp"
#include "report/pages.hpp"

namespace lockstep {
namespace {

uint32_t rgb_of(Colour colour) {
  switch (colour.role) {
    case Role::kInk:
      return 0x15181C;
    case Role::kMuted:
      return 0x5A626B;
    case Role::kGrid:
      return 0xD5DADF;
    case Role::kPaper:
      return 0xFFFFFF;
    case Role::kPalette:
      return kPalette.at(palette_index(colour.index));
    case Role::kOnPalette:
      break;
  }
  return palette_index(colour.index) == 0 ? 0xFFFFFF : 0x111111;
}

// Draws with Cairo in the colours of print.
class CairoCanvas final : public Canvas {
 public:
  // The context must outlive the canvas.
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

void CairoCanvas::set_colour(Colour colour) {
  const uint32_t rgb = rgb_of(colour);
  const auto part = [rgb](unsigned shift) {
    return static_cast<double>(rgb >> shift & 0xFFU) / 255;
  };
  cairo_set_source_rgb(context_, part(16), part(8), part(0));
}

void CairoCanvas::stroke_path(const Stroke& stroke) {
  set_colour(stroke.colour);
  const double w = stroke.width;
  const std::array dashed = {4 * w, 2.5 * w};
  const std::array dotted = {1.2 * w, 1.8 * w};
  const std::array dash_dot = {5 * w, 2 * w, 1.2 * w, 2 * w};
  std::span<const double> dashes;
  if (stroke.dash == Dash::kDashed) dashes = dashed;
  if (stroke.dash == Dash::kDotted) dashes = dotted;
  if (stroke.dash == Dash::kDashDot) dashes = dash_dot;
  cairo_set_dash(context_, dashes.data(), static_cast<int>(dashes.size()), 0);
  cairo_set_line_width(context_, w);
  cairo_stroke(context_);
}

void CairoCanvas::segments(std::span<const Segment> lines, const Stroke& stroke) {
  for (const auto& [from, to] : lines) {
    cairo_move_to(context_, from.x, from.y);
    cairo_line_to(context_, to.x, to.y);
  }
  stroke_path(stroke);
}

void CairoCanvas::polyline(std::span<const Point> points, const Stroke& stroke) {
  for (const auto& [x, y] : points) cairo_line_to(context_, x, y);
  stroke_path(stroke);
}

void CairoCanvas::polygon(std::span<const Point> corners, Colour fill) {
  for (const auto& [x, y] : corners) cairo_line_to(context_, x, y);
  cairo_close_path(context_);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::rectangle(const Box& box, Colour fill) {
  cairo_rectangle(context_, box.x, box.y, box.width, box.height);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::circle(Point centre, double radius, Colour fill) {
  cairo_new_sub_path(context_);
  cairo_arc(context_, centre.x, centre.y, radius, 0, 2 * std::numbers::pi);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::text(Point at, std::string_view utf8, const TextStyle& style) {
  const std::string clean = clean_text(utf8);
  const double width = text_width(clean, style.font);
  double left = 0;
  if (style.anchor == Anchor::kMiddle) left = -width / 2;
  if (style.anchor == Anchor::kEnd) left = -width;
  select_font(context_, style.font);
  set_colour(style.colour);
  cairo_save(context_);
  cairo_translate(context_, at.x, at.y);
  cairo_rotate(context_, style.rotation * std::numbers::pi / 180);
  cairo_move_to(context_, left, 0);
  cairo_show_text(context_, clean.c_str());
  cairo_restore(context_);
  cairo_new_path(context_);
}

// Links to files beside the PDF. Viewers resolve them against its own folder.
void add_links(cairo_t* context, const Drawing& page) {
  for (const auto& [box, path] : page.links()) {
    const std::string attributes = fmt::format("rect=[{:.2f} {:.2f} {:.2f} {:.2f}] uri='{}'", box.x,
                                               box.y, box.width, box.height, encode_link(path));
    cairo_tag_begin(context, CAIRO_TAG_LINK, attributes.c_str());
    cairo_tag_end(context, CAIRO_TAG_LINK);
  }
}

// The list of sections and their parts that a viewer shows beside the pages.
void add_outline(cairo_surface_t* surface, const std::vector<Drawing>& pages) {
  int section = CAIRO_PDF_OUTLINE_ROOT;
  for (size_t i = 0; i < pages.size(); ++i) {
    for (const auto& [y, title, level] : pages[i].bookmarks()) {
      const std::string place = fmt::format("page={} pos=[{:.2f} {:.2f}]", i + 1, kPrinted.x, y);
      const int added = cairo_pdf_surface_add_outline(
          surface, level == 0 ? CAIRO_PDF_OUTLINE_ROOT : section, clean_text(title).c_str(),
          place.c_str(), CAIRO_PDF_OUTLINE_FLAG_OPEN);
      if (level == 0) section = added;
    }
  }
}

cairo_status_t append_bytes(void* bytes, const unsigned char* data, unsigned int length) {
  static_cast<std::string*>(bytes)->append(reinterpret_cast<const char*>(data), length);
  return CAIRO_STATUS_SUCCESS;
}

void check_cairo(cairo_status_t status) {
  if (status == CAIRO_STATUS_SUCCESS) return;
  throw Error(Code::kFileWrite,
              fmt::format("cannot make the PDF: Cairo says {}", cairo_status_to_string(status)),
              "apt-get install fonts-dejavu-core");
}

}  // namespace

std::string render_pdf(const Document& document) {
  const auto pages = lay_out_pages(document);
  std::string bytes;
  const CairoSurface surface(
      cairo_pdf_surface_create_for_stream(append_bytes, &bytes, kPageWidth, kPageHeight));
  check_cairo(cairo_surface_status(surface.get()));
  const std::string title = clean_text(document.title);
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_TITLE, title.c_str());
  if (!document.author.empty()) {
    const std::string author = clean_text(document.author);
    cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_AUTHOR, author.c_str());
  }
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATOR, "lockstep");
  const std::string date = fmt::format("{:%Y-%m-%dT%H:%M:%S}Z", fmt::gmtime(document.date));
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATE_DATE, date.c_str());
  {
    const CairoContext context(cairo_create(surface.get()));
    CairoCanvas canvas(context.get());
    for (const auto& page : pages) {
      page.replay(canvas);
      add_links(context.get(), page);
      cairo_show_page(context.get());
    }
    check_cairo(cairo_status(context.get()));
  }
  add_outline(surface.get(), pages);
  cairo_surface_finish(surface.get());
  check_cairo(cairo_surface_status(surface.get()));
  return bytes;
}

}  // namespace lockstep
