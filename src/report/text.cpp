#include "report/text.hpp"

#include <fontconfig/fontconfig.h>

#include <algorithm>
#include <memory>

#include "base/utf8.hpp"
#include "lockstep/error.hpp"
#include "report/cairo.hpp"

namespace lockstep {
namespace {

struct PatternDeleter {
  void operator()(FcPattern* pattern) const { FcPatternDestroy(pattern); }
};
using Pattern = std::unique_ptr<FcPattern, PatternDeleter>;

// The installed family that is closest to DejaVu; empty if there is no font at all.
std::string find_family(bool mono) {
  const Pattern wanted(FcPatternCreate());
  const char* name = mono ? "DejaVu Sans Mono" : "DejaVu Sans";
  FcPatternAddString(wanted.get(), FC_FAMILY, reinterpret_cast<const FcChar8*>(name));
  FcConfigSubstitute(nullptr, wanted.get(), FcMatchPattern);
  FcDefaultSubstitute(wanted.get());
  FcResult result = FcResultNoMatch;
  const Pattern found(FcFontMatch(nullptr, wanted.get(), &result));
  FcChar8* family = nullptr;
  if (!found || FcPatternGetString(found.get(), FC_FAMILY, 0, &family) != FcResultMatch) return "";
  return reinterpret_cast<const char*>(family);
}

// A context for measuring, one per thread, because Cairo's contexts are not thread-safe.
cairo_t* measuring_context() {
  thread_local const CairoContext context = [] {
    const CairoSurface surface(cairo_image_surface_create(CAIRO_FORMAT_A8, 1, 1));
    return CairoContext(cairo_create(surface.get()));
  }();
  return context.get();
}

// Bytes of the longest start of `text` that is no wider than `width`; at least one character.
size_t bytes_that_fit(std::string_view text, const Font& font, double width) {
  size_t fitting = 0;
  while (fitting < text.size()) {
    const size_t next = fitting + first_character(text.substr(fitting)).bytes;
    if (fitting > 0 && text_width(text.substr(0, next), font) > width) break;
    fitting = next;
  }
  return fitting;
}

}  // namespace

std::string font_family(bool mono) {
  static const std::string sans = find_family(false);
  static const std::string fixed = find_family(true);
  return mono ? fixed : sans;
}

void require_font() {
  if (!font_family(false).empty()) return;
  throw Error(Code::kFileWrite, "cannot draw a report: this machine has no font",
              "apt-get install fonts-dejavu-core");
}

void select_font(cairo_t* context, const Font& font) {
  const std::string family = font_family(font.mono);
  cairo_select_font_face(context, family.c_str(), CAIRO_FONT_SLANT_NORMAL,
                         font.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(context, font.size);
  cairo_font_options_t* options = cairo_font_options_create();
  cairo_font_options_set_hint_style(options, CAIRO_HINT_STYLE_NONE);
  cairo_font_options_set_hint_metrics(options, CAIRO_HINT_METRICS_OFF);
  cairo_set_font_options(context, options);
  cairo_font_options_destroy(options);
}

double text_width(std::string_view utf8, const Font& font) {
  if (utf8.empty()) return 0;
  cairo_t* context = measuring_context();
  // Measure a large size and scale down, because Cairo rounds positions to 1/256.
  constexpr double kMeasured = 100;
  select_font(context, {.size = kMeasured, .bold = font.bold, .mono = font.mono});
  cairo_text_extents_t extents;
  cairo_text_extents(context, clean_text(utf8).c_str(), &extents);
  return extents.x_advance * font.size / kMeasured;
}

std::vector<std::string> wrap_lines(std::string_view text, const Font& font, double width) {
  const std::string clean = clean_text(text);
  std::vector<std::string> lines;
  std::string line;
  for (size_t begin = 0; begin < clean.size();) {
    if (clean[begin] == ' ') {
      ++begin;
      continue;
    }
    const size_t end = std::min(clean.find(' ', begin), clean.size());
    std::string word = clean.substr(begin, end - begin);
    begin = end;
    std::string longer = line;
    if (!line.empty()) longer += ' ';
    longer += word;
    if (text_width(longer, font) <= width) {
      line = std::move(longer);
      continue;
    }
    if (!line.empty()) lines.push_back(std::move(line));
    while (text_width(word, font) > width) {
      const size_t bytes = bytes_that_fit(word, font, width);
      if (bytes == word.size()) break;
      lines.push_back(word.substr(0, bytes));
      word.erase(0, bytes);
    }
    line = std::move(word);
  }
  if (!line.empty() || lines.empty()) lines.push_back(std::move(line));
  return lines;
}

std::vector<std::string> fold_line(std::string_view line, const Font& font, double width) {
  std::string rest = clean_text(line);
  std::vector<std::string> parts;
  while (text_width(rest, font) > width) {
    const size_t bytes = bytes_that_fit(rest, font, width);
    if (bytes == rest.size()) break;
    parts.push_back(rest.substr(0, bytes));
    rest.erase(0, bytes);
  }
  parts.push_back(std::move(rest));
  return parts;
}

std::string fit_text(std::string_view text, const Font& font, double width) {
  const std::string clean = clean_text(text);
  width += font.size * 1e-3;  // a text must fit the width that was measured for it
  if (text_width(clean, font) <= width) return clean;
  const double rest = width - text_width("…", font);
  if (rest <= 0) return "";
  std::string begin = clean.substr(0, bytes_that_fit(clean, font, rest));
  if (text_width(begin, font) > rest) return "";
  while (!begin.empty() && begin.back() == ' ') begin.pop_back();
  return begin + "…";
}

double widest_word(std::string_view text, const Font& font) {
  const std::string clean = clean_text(text);
  double widest = 0;
  for (size_t begin = 0; begin < clean.size();) {
    const size_t end = std::min(clean.find(' ', begin), clean.size());
    widest = std::max(widest, text_width(std::string_view(clean).substr(begin, end - begin), font));
    begin = end + 1;
  }
  return widest;
}

}  // namespace lockstep
