#include "lockstep/table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "base/table_data.hpp"
#include "base/utf8.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Bytes of the UTF-8 sequence that starts with `lead`; 0 if none can.
size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

// Whether a code point is valid and has the shortest encoding.
bool is_well_formed(char32_t point, size_t bytes) {
  constexpr std::array<char32_t, 5> kFirstOfLength = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  return point >= kFirstOfLength.at(bytes) && point <= 0x10FFFF && !surrogate;
}

// C0 and C1 controls, delete, and the two code points that XML forbids.
bool is_control(char32_t point) {
  return point < 0x20 || (point >= 0x7F && point < 0xA0) || point == 0xFFFE || point == 0xFFFF;
}

constexpr std::string_view kGap = "  ";

struct CodePoints {
  char32_t first;
  char32_t last;
};

// Combining marks, joiners and variation selectors take no column.
constexpr std::array kZeroWidth = {CodePoints{0x0300, 0x036F}, CodePoints{0x200B, 0x200F},
                                   CodePoints{0x20D0, 0x20F0}, CodePoints{0xFE00, 0xFE0F}};
// East Asian wide and fullwidth characters and emoji take two.
constexpr std::array kWide = {CodePoints{0x1100, 0x115F},   CodePoints{0x2E80, 0xA4CF},
                              CodePoints{0xAC00, 0xD7A3},   CodePoints{0xF900, 0xFAFF},
                              CodePoints{0xFE30, 0xFE4F},   CodePoints{0xFF00, 0xFF60},
                              CodePoints{0xFFE0, 0xFFE6},   CodePoints{0x1F300, 0x1F64F},
                              CodePoints{0x1F900, 0x1F9FF}, CodePoints{0x20000, 0x3FFFD}};

template <size_t N>
bool in_ranges(char32_t point, const std::array<CodePoints, N>& ranges) {
  return std::any_of(ranges.begin(), ranges.end(), [point](const CodePoints& range) {
    return point >= range.first && point <= range.last;
  });
}

size_t width_of(char32_t point) {
  if (in_ranges(point, kZeroWidth)) return 0;
  return in_ranges(point, kWide) ? 2 : 1;
}

// A cell is always one line on a terminal and in Markdown.
std::string one_line(std::string_view text) {
  std::string line(text);
  std::replace_if(
      line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r' || c == '\t'; }, ' ');
  return line;
}

std::string pad(const std::string& cell, size_t width, Align align) {
  const size_t used = display_width(cell);
  const std::string space(width > used ? width - used : 0, ' ');
  return align == Align::kLeft ? cell + space : space + cell;
}

std::string trimmed_right(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::string repeat(std::string_view piece, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += piece;
  return text;
}

}  // namespace

Table::Table(std::string title, std::vector<Column> columns)
    : title_(std::move(title)), columns_(std::move(columns)) {}

void Table::add_row(std::vector<std::string> cells) {
  if (cells.size() != columns_.size()) {
    throw Error(Code::kInternal, fmt::format("a row of table \"{}\" has {} cells for {} columns",
                                             title_, cells.size(), columns_.size()));
  }
  rows_.push_back(std::move(cells));
}

void Table::add_note(std::string note) {
  notes_.push_back(std::move(note));
}

std::string Table::terminal(bool bold) const {
  std::vector<size_t> widths;  // [column]
  for (size_t column = 0; column < columns_.size(); ++column) {
    size_t width = display_width(one_line(columns_[column].header));
    for (const auto& row : rows_) width = std::max(width, display_width(one_line(row[column])));
    widths.push_back(width);
  }
  size_t total = columns_.empty() ? 0 : (columns_.size() - 1) * kGap.size();
  for (const size_t width : widths) total += width;

  const auto line = [&](const auto& text_of) {
    std::string text;
    for (size_t column = 0; column < columns_.size(); ++column) {
      if (column > 0) text += kGap;
      text += pad(one_line(text_of(column)), widths[column], columns_[column].align);
    }
    return trimmed_right(text);
  };
  const auto strong = [bold](const std::string& text) {
    return bold ? "\033[1m" + text + "\033[0m\n" : text + "\n";
  };

  const std::string rule = repeat("─", total) + "\n";
  std::string text = strong(one_line(title_)) + rule;
  text += strong(line([&](size_t column) { return columns_[column].header; })) + rule;
  for (const auto& row : rows_) text += line([&](size_t column) { return row[column]; }) + "\n";
  text += rule;
  for (const auto& note : notes_) text += wrap_text(note, std::max<size_t>(total, 80)) + "\n";
  return text;
}

std::string Table::markdown() const {
  std::string text = "### " + escape_markdown(one_line(title_)) + "\n\n|";
  for (const auto& column : columns_) text += " " + escape_markdown(one_line(column.header)) + " |";
  text += "\n|";
  for (const auto& column : columns_) text += column.align == Align::kLeft ? " --- |" : " ---: |";
  for (const auto& row : rows_) {
    text += "\n|";
    for (const auto& cell : row) text += " " + escape_markdown(one_line(cell)) + " |";
  }
  text += "\n";
  for (const auto& note : notes_) text += "\n" + escape_markdown(one_line(note)) + "\n";
  return text;
}

std::string Table::csv() const {
  return csv_of(data_of(*this));
}

size_t display_width(std::string_view utf8) {
  size_t width = 0;
  while (!utf8.empty()) {
    const Utf8Character decoded = first_character(utf8);
    width += width_of(decoded.point);
    utf8.remove_prefix(decoded.bytes);
  }
  return width;
}

std::string escape_markdown(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (std::string_view("\\|*`<").find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

bool may_style(int descriptor) {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  const char* term = std::getenv("TERM");
  if (term == nullptr || std::string_view(term) == "dumb") return false;
  return ::isatty(descriptor) == 1;
}

std::string wrap_text(std::string_view text, size_t width, std::string_view indent) {
  std::string wrapped;
  std::string line(indent);
  bool fresh = true;  // the line has no word yet
  const auto flush = [&](std::string_view end) {
    wrapped += trimmed_right(line) + std::string(end);
    line = indent;
    fresh = true;
  };
  for (size_t begin = 0; begin < text.size();) {
    if (text[begin] == '\n') {
      flush("\n");
      ++begin;
      continue;
    }
    if (text[begin] == ' ') {
      ++begin;
      continue;
    }
    const size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    if (!fresh && display_width(line) + 1 + display_width(word) > width) flush("\n");
    if (!fresh) line += ' ';
    line += word;
    fresh = false;
    begin = end;
  }
  flush("");
  return wrapped;
}

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
