#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::cli {

/// What a piece of text is drawn in, where colours are allowed.
enum class Ink { kPlain, kStrong, kFaint, kGood, kWarn, kBad, kMemory, kBusy };

/// A line of coloured pieces. Widths are counted without the colour codes.
class Line {
 public:
  void add(std::string text, Ink ink = Ink::kPlain);
  size_t width() const { return width_; }

  /// At most `max_width` columns, without trailing spaces.
  std::string text(size_t max_width, bool colour) const;

 private:
  struct Piece {
    std::string text;
    Ink ink;
  };
  std::vector<Piece> pieces_;
  size_t width_ = 0;
};

/// Fields that follow each other, two spaces apart, and go on in a further indented line where one
/// does not fit any more.
class Flow {
 public:
  Flow(size_t width, size_t indent) : width_(width), indent_(indent) {}

  void add(std::string field, Ink ink = Ink::kPlain);
  void finish(std::vector<Line>& lines);  ///< appends all lines

 private:
  size_t width_;
  size_t indent_;
  std::vector<Line> done_;
  Line line_;
  bool fresh_ = true;  // nothing in line_ but its indent
};

/// Text that cannot move the cursor: control characters and broken UTF-8 become '?'; without
/// `utf8` all that is not ASCII does.
std::string printable(const std::string& text, bool utf8);

}  // namespace lockstep::cli
