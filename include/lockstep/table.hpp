#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class Align { kLeft, kRight };

struct Column {
  std::string header;
  Align align = Align::kLeft;
};

/// A table of text cells, rendered for a terminal, a Markdown report or a spreadsheet.
class Table {
 public:
  Table(std::string title, std::vector<Column> columns);

  /// One cell per column; another number of cells is an Error.
  void add_row(std::vector<std::string> cells);

  /// A remark printed under the table.
  void add_note(std::string note);

  const std::string& title() const { return title_; }
  const std::vector<Column>& columns() const { return columns_; }
  const std::vector<std::vector<std::string>>& rows() const { return rows_; }
  const std::vector<std::string>& notes() const { return notes_; }

  /// Ruled and aligned by display width; `bold` marks title and header with ANSI codes.
  std::string terminal(bool bold) const;

  /// A pipe table under a `###` title; characters with a meaning in Markdown are escaped.
  std::string markdown() const;

  /// Header and rows as in RFC 4180; title and notes are left out.
  std::string csv() const;

 private:
  std::string title_;
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::string> notes_;
};

/// Columns a UTF-8 text takes on a terminal: "4 µs ± 1" is 8. A broken byte counts as one.
size_t display_width(std::string_view utf8);

/// Text with the characters that Markdown would interpret escaped.
std::string escape_markdown(std::string_view text);

/// Whether ANSI styles may be written to this descriptor: it is a terminal, and neither NO_COLOR
/// nor TERM=dumb forbids them.
bool may_style(int descriptor);

/// Words broken into lines of at most `width` columns, each line after `indent`; a word that is
/// longer stands alone. Line breaks in the text stay.
std::string wrap_text(std::string_view text, size_t width, std::string_view indent = "");

}  // namespace lockstep
