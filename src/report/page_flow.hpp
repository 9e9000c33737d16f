#pragma once

#include <deque>
#include <functional>
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

/// Fills pages from top to bottom. A block that floats and does not fit any more goes to the top of
/// the next page, and what follows fills this one.
class Flow {
 public:
  using Draw = std::function<void(Flow&)>;

  explicit Flow(const Box& body) : body_(body) { new_page(); }

  Drawing& page() { return pages_.back(); }
  double y() const { return y_; }
  double left() const { return body_.x; }
  double width() const { return body_.width; }
  double page_height() const { return body_.height; }
  bool at_top() const { return y_ <= body_.y; }
  double rest() const { return body_.bottom() - y_; }  ///< height that is left on the page
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

  /// Draws a block that needs `height`, now or at the top of a later page. Blocks keep their order.
  /// `before` is the space above it.
  void float_block(double height, double before, Draw draw);

  /// Draws the blocks that wait for a page.
  void flush_floats();

  void rule(double thickness, Colour colour);

  std::vector<Drawing> take() { return std::move(pages_); }

 private:
  struct Waiting {
    double height;
    Draw draw;
  };

  void new_page();
  void draw_waiting();

  Box body_;
  double y_ = 0;
  std::deque<Waiting> waiting_;
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

  /// The height of what must stay together: title, header and the first rows, or all of a short
  /// table.
  double lead_height() const;

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
  double height() const;
  double notes_height() const;

  /// The height that must be left before row `index`, so that no part of a table is shorter than
  /// three rows and its notes stand below a row.
  double needed_before(size_t index) const;

  const Table& table_;
  std::string title_;
  double page_width_;
  double page_height_;
  double font_size_ = 0;
  std::vector<double> lefts_;   // [column], from the left edge of the page
  std::vector<double> widths_;  // [column]
  Row header_;
  std::vector<Row> rows_;
};

}  // namespace lockstep
