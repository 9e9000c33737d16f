#include "cli/top/top_line.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/table.hpp"

namespace lockstep::cli {
namespace {

const char* code_of(Ink ink) {
  switch (ink) {
    case Ink::kPlain:
      return "";
    case Ink::kStrong:
      return "\033[1m";
    case Ink::kFaint:
      return "\033[2m";
    case Ink::kGood:
    case Ink::kBusy:
      return "\033[32m";
    case Ink::kWarn:
      return "\033[33m";
    case Ink::kBad:
      return "\033[1;31m";
    case Ink::kMemory:
      return "\033[36m";
  }
  return "";
}

// Bytes of the UTF-8 character that begins at `at`; 0 where there is no whole, proper one.
size_t character_bytes(const std::string& text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t count = lead < 0x80   ? 1
                       : lead < 0xC2 ? 0
                       : lead < 0xE0 ? 2
                       : lead < 0xF0 ? 3
                       : lead < 0xF5 ? 4
                                     : 0;
  if (count == 0 || at + count > text.size()) return 0;
  for (size_t i = 1; i < count; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
  }
  return count;
}

// U+0080 to U+009F, which some terminals obey as they obey ESC.
bool is_control(const std::string& character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7F;
  return first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
}

// The beginning of a text, as many whole characters as fit.
std::string clipped(const std::string& text, size_t width) {
  if (display_width(text) <= width) return text;
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    const size_t count = std::max<size_t>(1, character_bytes(text, at));
    const std::string longer = kept + text.substr(at, count);
    if (display_width(longer) > width) break;
    kept = longer;
    at += count;
  }
  return kept;
}

}  // namespace

std::string printable(const std::string& text, bool utf8) {
  std::string safe;
  for (size_t at = 0; at < text.size();) {
    const size_t count = character_bytes(text, at);
    const std::string character = text.substr(at, std::max<size_t>(1, count));
    if (count == 0 || is_control(character)) {
      safe += '?';
    } else if (count > 1 && !utf8) {
      safe += character == "µ" ? "u" : "?";
    } else {
      safe += character;
    }
    at += character.size();
  }
  return safe;
}

void Line::add(std::string text, Ink ink) {
  if (text.empty()) return;
  width_ += display_width(text);
  pieces_.push_back({std::move(text), ink});
}

std::string Line::text(size_t max_width, bool colour) const {
  std::vector<Piece> kept;
  size_t left = max_width;
  for (const auto& piece : pieces_) {
    std::string text = clipped(piece.text, left);
    left -= display_width(text);
    const bool whole = text.size() == piece.text.size();
    kept.push_back({std::move(text), piece.ink});
    if (!whole) break;
  }
  while (!kept.empty()) {
    std::string& last = kept.back().text;
    last.erase(last.find_last_not_of(' ') + 1);
    if (!last.empty()) break;
    kept.pop_back();
  }
  std::string text;
  for (const auto& piece : kept) {
    const bool plain = !colour || piece.ink == Ink::kPlain;
    text += plain ? piece.text : fmt::format("{}{}\033[0m", code_of(piece.ink), piece.text);
  }
  return text;
}

void Flow::add(std::string field, Ink ink) {
  const size_t own = display_width(field);
  if (!fresh_ && line_.width() + 2 + own > width_) {
    done_.push_back(std::move(line_));
    line_ = {};
    line_.add(std::string(indent_, ' '));
    fresh_ = true;
  }
  if (!fresh_) line_.add("  ");
  line_.add(std::move(field), ink);
  fresh_ = false;
}

void Flow::finish(std::vector<Line>& lines) {
  for (auto& line : done_) lines.push_back(std::move(line));
  lines.push_back(std::move(line_));
}

}  // namespace lockstep::cli
