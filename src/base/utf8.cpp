#include "base/utf8.hpp"

#include <array>

namespace lockstep {
namespace {

// Bytes of the UTF-8 sequence that `lead` begins; 0 where none can begin with it.
size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

// Whether a code point may be written at all, and with that many bytes.
bool is_well_formed(char32_t point, size_t bytes) {
  constexpr std::array<char32_t, 5> kFirstOfLength = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  return point >= kFirstOfLength.at(bytes) && point <= 0x10FFFF && !surrogate;
}

// C0 and C1 controls, delete, and the two code points that XML forbids.
bool is_control(char32_t point) {
  return point < 0x20 || (point >= 0x7F && point < 0xA0) || point == 0xFFFE || point == 0xFFFF;
}

}  // namespace

Utf8Character first_character(std::string_view utf8) {
  constexpr Utf8Character kBroken = {0xFFFD, 1};
  const auto lead = static_cast<unsigned char>(utf8[0]);
  const size_t length = sequence_length(lead);
  if (length == 0 || length > utf8.size()) return kBroken;
  char32_t point = length == 1 ? lead : lead & (0x7FU >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto next = static_cast<unsigned char>(utf8[i]);
    if ((next & 0xC0U) != 0x80U) return kBroken;
    point = (point << 6U) | (next & 0x3FU);
  }
  return is_well_formed(point, length) ? Utf8Character{point, length} : kBroken;
}

std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const auto [point, bytes] = first_character(text);
    if (is_control(point)) {
      clean += ' ';
    } else if (point == 0xFFFD) {
      clean += "\uFFFD";
    } else {
      clean += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return clean;
}

}  // namespace lockstep
