#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// DejaVu Sans or DejaVu Sans Mono.
struct Font {
  double size = 9;
  bool bold = false;
  bool mono = false;
};

/// How far letters reach above and below the baseline, in font sizes.
inline constexpr double kAscent = 0.78;
inline constexpr double kDescent = 0.24;

/// Refuses a machine without any font, by name of the package to install.
void require_font();

/// The family that fontconfig has for a font; layout and drawing use the same.
std::string font_family(bool mono);

/// Width of one line, in the units of the font's size.
double text_width(std::string_view utf8, const Font& font);

/// Words broken into lines no wider than `width`; a longer word is broken inside. Never empty.
std::vector<std::string> wrap_lines(std::string_view text, const Font& font, double width);

/// The text, or as much of its begin as fits, with "…" after it; empty where not even that fits.
std::string fit_text(std::string_view text, const Font& font, double width);

/// The widest of the lines, and of the words where they may be broken between.
double widest_word(std::string_view text, const Font& font);

}  // namespace lockstep
