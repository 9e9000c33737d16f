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

/// How far letters extend above and below the baseline, as a share of the font size.
inline constexpr double kAscent = 0.78;
inline constexpr double kDescent = 0.24;

/// Throws on a machine without any font. The error names the package to install.
void require_font();

/// The installed family that fontconfig chooses. Layout and drawing use the same.
std::string font_family(bool mono);

/// The width of one line, in the unit of the font's size.
double text_width(std::string_view utf8, const Font& font);

/// Breaks a text between words into lines no wider than `width`, and longer words too. Never empty.
std::vector<std::string> wrap_lines(std::string_view text, const Font& font, double width);

/// Breaks a line of code between any two characters, and keeps its spaces. Never empty.
std::vector<std::string> fold_line(std::string_view line, const Font& font, double width);

/// The text, or as much of its start as fits, followed by "…"; empty if not even that fits.
std::string fit_text(std::string_view text, const Font& font, double width);

/// The width of the widest word.
double widest_word(std::string_view text, const Font& font);

}  // namespace lockstep
