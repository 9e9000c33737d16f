#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

struct Utf8Character {
  char32_t point;
  size_t bytes;
};

/// The first character of a non-empty text; a broken sequence is U+FFFD and one byte long.
Utf8Character first_character(std::string_view utf8);

/// A text that every output can hold: broken bytes become U+FFFD, control characters (line breaks
/// too) become spaces.
std::string clean_text(std::string_view text);

}  // namespace lockstep
