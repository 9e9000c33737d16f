#include <cairo/cairo-pdf.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include "base/utf8.hpp"
#include "lockstep/error.hpp"
#include "report/cairo_canvas.hpp"
#include "report/document.hpp"
#include "report/pages.hpp"

namespace lockstep {
namespace {

cairo_status_t append(void* bytes, const unsigned char* data, unsigned int length) {
  static_cast<std::string*>(bytes)->append(reinterpret_cast<const char*>(data), length);
  return CAIRO_STATUS_SUCCESS;
}

void check(cairo_status_t status) {
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
      cairo_pdf_surface_create_for_stream(append, &bytes, kPageWidth, kPageHeight));
  check(cairo_surface_status(surface.get()));
  const std::string title = clean_text(document.title);
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_TITLE, title.c_str());
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATOR, "lockstep");
  const std::string date = fmt::format("{:%Y-%m-%dT%H:%M:%S}Z", fmt::gmtime(document.date));
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATE_DATE, date.c_str());
  {
    const CairoContext context(cairo_create(surface.get()));
    CairoCanvas canvas(context.get());
    for (const auto& page : pages) {
      page.replay(canvas);
      cairo_show_page(context.get());
    }
    check(cairo_status(context.get()));
  }
  cairo_surface_finish(surface.get());
  check(cairo_surface_status(surface.get()));
  return bytes;
}

}  // namespace lockstep
