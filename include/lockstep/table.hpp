#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// The side on which cells of a column line up.
enum class Align { kLeft, kRight };

/// The width of output that is not a terminal: lines are not cut or wrapped.
inline constexpr size_t kAnyWidth = static_cast<size_t>(-1);

/// Title and alignment of a column.
struct Column {
  std::string header;
  Align align = Align::kLeft;
};

/// The numbers that a cell shows, all of one unit.
struct CellValue {
  /// What they are together: one number, "77.8 ± 5.1", "40 … 44", "22 20", "4 × 64", "0 of 8".
  enum class Kind { kValue, kMean, kRange, kList, kProduct, kShare };

  Kind kind = Kind::kValue;
  std::string unit = {};             ///< "ms", "mib", "percent"; "" for plain numbers
  std::vector<double> numbers = {};  ///< none in a cell of text
  std::string remark = {};           ///< "shared" of "4, shared"
};

/// The text of a cell, and the numbers that it shows.
struct TableCell : std::string {
  TableCell() = default;
  TableCell(std::string text, CellValue shown = {})
      : std::string(std::move(text)), value(std::move(shown)) {}
  TableCell(const char* text) : std::string(text) {}

  CellValue value;
};

/// A table of text cells, rendered for a terminal, a Markdown report or a spreadsheet.
class Table {
 public:
  Table(std::string title, std::vector<Column> columns);

  /// Adds a row with one cell per column. Another number of cells is an Error.
  void add_row(std::vector<TableCell> cells);

  /// Adds a remark that is printed under the table.
  void add_note(std::string note);

  const std::string& title() const { return title_; }
  const std::vector<Column>& columns() const { return columns_; }
  const std::vector<std::vector<std::string>>& rows() const { return rows_; }
  /// What the cells of rows() show: [row][column].
  const std::vector<std::vector<CellValue>>& values() const { return values_; }
  const std::vector<std::string>& notes() const { return notes_; }

  /// With rules, aligned by display width. `bold` sets title and header in bold by ANSI codes. A
  /// table that is wider than `width` breaks headers and texts between words; if that is not
  /// enough, rows become columns, or else each row a block with a line for each column.
  std::string terminal(bool bold, size_t width = kAnyWidth) const;

  /// A pipe table under a `###` title, with Markdown's special characters escaped.
  std::string markdown() const;

  /// Header and rows as in RFC 4180, without title and notes. Cells with numbers give these, with
  /// their unit in the header: a mean and a deviation in the column "step time" become
  /// step_time_mean_ms and step_time_deviation_ms.
  std::string csv() const;

 private:
  std::string title_;
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::vector<CellValue>> values_;  // of rows_
  std::vector<std::string> notes_;
};

/// Columns that a UTF-8 text takes on a terminal: 8 for "4 µs ± 1". An invalid byte counts as one.
size_t display_width(std::string_view utf8);

/// The text with Markdown's special characters escaped.
std::string escape_markdown(std::string_view text);

/// Whether ANSI styles may be written to this descriptor: it is a terminal, NO_COLOR is not set and
/// TERM is not "dumb".
bool may_style(int descriptor);

/// Columns of the terminal that this descriptor writes to: COLUMNS, or what the terminal says, or
/// 80. If it is not a terminal: kAnyWidth, or LOCKSTEP_COLUMNS, by which `lockstep run` tells its
/// ranks how wide its own is.
size_t terminal_width(int descriptor);

/// The text if it takes at most `width` columns, else its beginning and "…".
std::string clip_text(std::string_view text, size_t width);

/// Breaks a text between words into lines of at most `width` columns, each after `indent`. A longer
/// word gets a line of its own. Line breaks in the text are kept.
std::string wrap_text(std::string_view text, size_t width, std::string_view indent = "");

}  // namespace lockstep
