#include "lockstep/table.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

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

std::vector<std::string> wrapped_lines(const std::string& text, size_t width) {
  const std::string wrapped = wrap_text(text, width);
  std::vector<std::string> lines;
  for (size_t begin = 0; begin <= wrapped.size();) {
    const size_t end = std::min(wrapped.find('\n', begin), wrapped.size());
    lines.push_back(wrapped.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

size_t longest_word(const std::string& text) {
  size_t longest = 0;
  for (const auto& word : wrapped_lines(text, 1)) longest = std::max(longest, display_width(word));
  return longest;
}

struct ColumnRange {
  size_t least = 0;   // headers and texts broken at every space; numbers are never broken
  size_t cells = 0;   // only the header broken
  size_t widest = 0;  // nothing broken
};

size_t total_width(const std::vector<size_t>& widths) {
  size_t total = widths.empty() ? 0 : (widths.size() - 1) * kGap.size();
  for (const size_t width : widths) total += width;
  return total;
}

// A text that is broken into more lines than this is hard to read across a row.
constexpr size_t kMostLines = 4;

// Column widths whose total is at most `width`; nothing if that takes too many lines. Room goes to
// the column whose texts are broken most, and to headers only when no text is broken.
std::optional<std::vector<size_t>> divide_width(const std::vector<ColumnRange>& ranges,
                                                size_t width) {
  std::vector<size_t> widths;
  std::vector<size_t> cells;
  std::vector<size_t> widest;
  for (const auto& range : ranges) {
    widths.push_back(std::max<size_t>(1, range.least));
    cells.push_back(range.cells);
    widest.push_back(range.widest);
  }
  if (total_width(widest) <= width) return widest;
  if (total_width(widths) > width) return std::nullopt;
  // The column that needs most lines for a text of its width in `goal`, and that number.
  const auto most_broken = [&widths](const std::vector<size_t>& goal) {
    std::pair<double, size_t> most{0, 0};
    for (size_t column = 0; column < widths.size(); ++column) {
      const auto lines = static_cast<double>(goal[column]) / static_cast<double>(widths[column]);
      if (lines > most.first) most = {lines, column};
    }
    return most;
  };
  for (size_t left = width - total_width(widths); left > 0; --left) {
    const auto [lines, column] = most_broken(cells);
    ++widths[lines > 1 ? column : most_broken(widest).second];
  }
  if (most_broken(widest).first > kMostLines) return std::nullopt;
  return widths;
}

std::optional<size_t> columns_of_variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  const char* end = text + std::strlen(text);
  size_t columns = 0;
  const auto parsed = std::from_chars(text, end, columns);
  if (parsed.ec != std::errc() || parsed.ptr != end || columns == 0) return std::nullopt;
  return columns;
}

std::vector<ColumnRange> column_ranges(const std::vector<Column>& columns,
                                       const std::vector<std::vector<std::string>>& rows) {
  std::vector<ColumnRange> ranges;
  for (size_t column = 0; column < columns.size(); ++column) {
    const std::string header = one_line(columns[column].header);
    const size_t word = longest_word(header);
    ColumnRange range{word, word, display_width(header)};
    for (const auto& row : rows) {
      const std::string cell = one_line(row[column]);
      const size_t own = display_width(cell);
      const bool number = columns[column].align == Align::kRight;
      range.least = std::max(range.least, number ? own : longest_word(cell));
      range.cells = std::max(range.cells, own);
      range.widest = std::max(range.widest, own);
    }
    ranges.push_back(range);
  }
  return ranges;
}

// The table with a column for each row: few rows can still be compared side by side.
Table flip(const Table& table) {
  std::vector<Column> columns = {{table.columns()[0].header}};
  for (const auto& row : table.rows()) columns.push_back({row[0], Align::kRight});
  Table flipped(table.title(), std::move(columns));
  for (size_t column = 1; column < table.columns().size(); ++column) {
    std::vector<TableCell> cells = {table.columns()[column].header};
    for (const auto& row : table.rows()) cells.push_back(row[column]);
    flipped.add_row(std::move(cells));
  }
  for (const auto& note : table.notes()) flipped.add_note(note);
  return flipped;
}

// One row as a block: the first column as its heading, then a line for each other column.
template <class Strong>
std::string block_of(const std::vector<Column>& columns, const std::vector<std::string>& row,
                     size_t width, const Strong& strong) {
  size_t label = 0;
  for (size_t column = 1; column < columns.size(); ++column) {
    label = std::max(label, display_width(one_line(columns[column].header)));
  }
  label = std::min(label, width / 2);
  const size_t indent = kGap.size() + label + kGap.size();
  const std::string& name = columns[0].header;
  std::string text;
  for (const auto& line :
       wrapped_lines(one_line(name.empty() ? row[0] : name + ": " + row[0]), width)) {
    text += strong(line);
  }
  for (size_t column = 1; column < columns.size(); ++column) {
    const auto labels = wrapped_lines(one_line(columns[column].header), label);
    const auto values = wrapped_lines(one_line(row[column]), width > indent ? width - indent : 1);
    for (size_t line = 0; line < std::max(labels.size(), values.size()); ++line) {
      const std::string left = line < labels.size() ? labels[line] : "";
      text += trimmed_right(std::string(kGap) + pad(left, label, Align::kLeft) + std::string(kGap) +
                            (line < values.size() ? values[line] : "")) +
              "\n";
    }
  }
  return text;
}

}  // namespace

Table::Table(std::string title, std::vector<Column> columns)
    : title_(std::move(title)), columns_(std::move(columns)) {}

void Table::add_row(std::vector<TableCell> cells) {
  if (cells.size() != columns_.size()) {
    throw Error(Code::kInternal, fmt::format("a row of table \"{}\" has {} cells for {} columns",
                                             title_, cells.size(), columns_.size()));
  }
  rows_.emplace_back();
  values_.emplace_back();
  for (TableCell& cell : cells) {
    values_.back().push_back(std::move(cell.value));
    rows_.back().push_back(std::move(cell));
  }
}

void Table::add_note(std::string note) {
  notes_.push_back(std::move(note));
}

std::string Table::terminal(bool bold, size_t width) const {
  const auto widths = divide_width(column_ranges(columns_, rows_), width);
  if (!widths && columns_.size() > 1) {
    const Table flipped = flip(*this);
    if (divide_width(column_ranges(flipped.columns_, flipped.rows_), width)) {
      return flipped.terminal(bold, width);
    }
  }
  const size_t total = widths ? total_width(*widths) : width;
  const auto strong = [bold](const std::string& text) {
    return bold ? "\033[1m" + text + "\033[0m\n" : text + "\n";
  };
  const std::string rule = repeat("─", total) + "\n";
  std::string text;
  for (const auto& line : wrapped_lines(one_line(title_), width)) text += strong(line);
  text += rule;

  // One row of the table, on as many lines as its longest cell needs.
  const auto add_row = [&](const auto& text_of, const auto& styled) {
    std::vector<std::vector<std::string>> cells;  // [column][line]
    size_t height = 0;
    for (size_t column = 0; column < columns_.size(); ++column) {
      cells.push_back(wrapped_lines(one_line(text_of(column)), (*widths)[column]));
      height = std::max(height, cells.back().size());
    }
    for (size_t line = 0; line < height; ++line) {
      std::string joined;
      for (size_t column = 0; column < columns_.size(); ++column) {
        if (column > 0) joined += kGap;
        const bool empty = line >= cells[column].size();
        joined += pad(empty ? "" : cells[column][line], (*widths)[column], columns_[column].align);
      }
      text += styled(trimmed_right(joined));
    }
  };
  const auto plain = [](const std::string& line) { return line + "\n"; };
  if (widths) {
    add_row([&](size_t column) { return columns_[column].header; }, strong);
    text += rule;
    for (const auto& row : rows_) add_row([&](size_t column) { return row[column]; }, plain);
    text += rule;
  } else {
    for (const auto& row : rows_) text += block_of(columns_, row, width, strong) + rule;
  }
  const size_t note_width = std::min(std::max<size_t>(total, 80), width);
  for (const auto& note : notes_) text += wrap_text(note, note_width) + "\n";
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

size_t terminal_width(int descriptor) {
  if (::isatty(descriptor) != 1) {
    return columns_of_variable("LOCKSTEP_COLUMNS").value_or(kAnyWidth);
  }
  if (const auto columns = columns_of_variable("COLUMNS")) return *columns;
  winsize window{};
  const bool known = ::ioctl(descriptor, TIOCGWINSZ, &window) == 0 && window.ws_col > 0;
  return known ? window.ws_col : 80;
}

std::string clip_text(std::string_view text, size_t width) {
  if (display_width(text) <= width) return std::string(text);
  std::string kept;
  for (size_t used = 0; !text.empty();) {
    const size_t bytes = first_character(text).bytes;
    used += display_width(text.substr(0, bytes));
    if (used + 1 > width) break;
    kept += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return width > 0 ? kept + "…" : "";
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

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const auto [point, bytes] = first_character(text);
    if (point == 0xFFFD && bytes == 1) return false;
    text.remove_prefix(bytes);
  }
  return true;
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
