#pragma once

#include <string>
#include <vector>

#include "report/drawing.hpp"

namespace lockstep {

/// How text of one kind is set on a page.
struct Setting {
  Font font;
  double leading = 12;  ///< from baseline to baseline
  Colour colour;
};

/// Pages that fill from top to bottom.
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

  /// Turns the page where less than this is left, but never an empty one.
  void need(double height);

  void advance(double height) { y_ += height; }

  /// Space between blocks; none at the top of a page.
  void space(double height);

  /// One line of text at the left edge plus `indent`.
  void line(const std::string& text, const Setting& setting, double indent = 0);

  /// A paragraph; no line of it stands alone at the top or the bottom of a page.
  void paragraph(const std::string& text, const Setting& setting);

  void rule(double thickness, Colour colour);

  std::vector<Drawing> take() { return std::move(pages_); }

 private:
  void new_page();

  Box body_;
  double y_ = 0;
  std::vector<Drawing> pages_;
};

/// Height of a text when it is set this wide.
double set_height(const std::string& text, const Setting& setting, double width);

/// Height of the first lines of a paragraph, which Flow::paragraph keeps together.
double lead_height(const std::string& text, const Setting& setting, double width);

}  // namespace lockstep
