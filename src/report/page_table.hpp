#pragma once

#include <string>
#include <vector>

#include "lockstep/table.hpp"
#include "report/flow.hpp"

namespace lockstep {

/// A table fitted to the width of a page.
class PageTable {
 public:
  PageTable(const Table& table, size_t number, double width, double page_height);

  /// What must stay together at its begin: title, header and the first rows.
  double lead_height() const;

  double height() const;

  void draw(Flow& flow) const;

 private:
  using Cells = std::vector<std::vector<std::string>>;  // [column][line]

  struct Row {
    Cells cells;
    double height = 0;
  };

  void choose_widths(double width);
  Row make_row(const std::vector<std::string>& texts, const Font& font) const;
  /// Leaves out the lines that are too many.
  void shorten(Row& row, double most_height) const;
  void add_row(const std::vector<std::string>& texts, double most_height);
  void draw_row(Flow& flow, const Row& row, const Font& font, bool at_bottom) const;
  void draw_header(Flow& flow) const;
  double right_edge() const;

  const Table& table_;
  std::string title_;
  double page_width_;
  double font_size_ = 0;
  std::vector<double> lefts_;   // [column], from the left edge of the page
  std::vector<double> widths_;  // [column]
  Row header_;
  std::vector<Row> rows_;
};

}  // namespace lockstep
