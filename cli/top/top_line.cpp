#include "cli/top/top_line.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/utf8.hpp"
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

// The beginning of a text: as many whole characters as fit.
std::string clipped(const std::string& text, size_t width) {
  size_t end = 0;
  for (size_t used = 0; end < text.size();) {
    const size_t bytes = first_character(std::string_view(text).substr(end)).bytes;
    used += display_width(text.substr(end, bytes));
    if (used > width) break;
    end += bytes;
  }
  return text.substr(0, end);
}

}  // namespace

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

std::vector<std::string> render(const std::vector<Line>& lines, size_t max_width, bool colour) {
  std::vector<std::string> texts;
  for (const auto& line : lines) texts.push_back(line.text(max_width, colour));
  return texts;
}

}  // namespace lockstep::cli
