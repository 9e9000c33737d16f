#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

struct Utf8Character {
  char32_t point;
  size_t bytes;
};

/// The first character of a non-empty text. An invalid sequence counts as U+FFFD of one byte.
Utf8Character first_character(std::string_view utf8);

bool is_utf8(std::string_view text);

/// A text that every output can show: invalid bytes become U+FFFD, and control characters, line
/// breaks included, become spaces.
std::string clean_text(std::string_view text);

}  // namespace lockstep
