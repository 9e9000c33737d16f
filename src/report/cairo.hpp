#pragma once

#include <cairo/cairo.h>

#include <memory>

#include "report/text.hpp"

namespace lockstep {

struct CairoDeleter {
  void operator()(cairo_t* context) const { cairo_destroy(context); }
  void operator()(cairo_surface_t* surface) const { cairo_surface_destroy(surface); }
};

using CairoContext = std::unique_ptr<cairo_t, CairoDeleter>;
using CairoSurface = std::unique_ptr<cairo_surface_t, CairoDeleter>;

/// Selects the font for measuring or drawing, without hinting, so that widths scale with the size.
void select_font(cairo_t* context, const Font& font);

}  // namespace lockstep
