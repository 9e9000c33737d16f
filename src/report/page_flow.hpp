#pragma once

#include <string>
#include <vector>

#include "lockstep/table.hpp"
#include "report/canvas.hpp"

namespace lockstep {

/// How text of one kind is set on a page.
struct Setting {
  Font font;
  double leading = 12;  ///< from baseline to baseline
  Colour colour;
};

/// Fills pages from top to bottom.
class Flow {
 public:
  explicit Flow(const Box& body) : body_(body) { new_page(); }

  Drawing& page() { return pages_.back(); }
  double y() const { return y_; }
  double left() const { return body_.x; }
  double width() const { return body_.width; }
  double page_height() const { return body_.height; }
  bool at_top() const { return y_ <= body_.y; }
  bool fits(double height) const { return y_ + height <= body_.bottom() + 1e-6; }

  /// Starts a new page if less than this is left, unless the page is empty.
  void need(double height);

  void advance(double height) { y_ += height; }

  /// Leaves space between blocks, but none at the top of a page.
  void space(double height);

  /// Writes one line of text, `indent` from the left edge.
  void line(const std::string& text, const Setting& setting, double indent = 0);

  /// Writes a paragraph. No line of it stands alone at the top or bottom of a page.
  void paragraph(const std::string& text, const Setting& setting);

  void rule(double thickness, Colour colour);

  std::vector<Drawing> take() { return std::move(pages_); }

 private:
  void new_page();

  Box body_;
  double y_ = 0;
  std::vector<Drawing> pages_;
};

/// The height of a text that is set in this width.
double set_height(const std::string& text, const Setting& setting, double width);

/// The height of the first lines of a paragraph, which Flow::paragraph keeps together.
double lead_height(const std::string& text, const Setting& setting, double width);

/// A table fitted to the width of a page.
class PageTable {
 public:
  PageTable(const Table& table, size_t number, double width, double page_height);

  /// The height of what must stay together: title, header and the first rows.
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
  /// Drops the lines beyond this height.
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
