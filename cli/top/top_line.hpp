#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::cli {

/// The colour of a piece of text, if colours are allowed.
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

/// Fields that follow each other, two spaces apart. A field that does not fit starts a new,
/// indented line.
class Flow {
 public:
  Flow(size_t width, size_t indent) : width_(width), indent_(indent) {}

  void add(std::string field, Ink ink = Ink::kPlain);
  void finish(std::vector<Line>& lines);  // appends all lines

 private:
  size_t width_;
  size_t indent_;
  std::vector<Line> done_;
  Line line_;
  bool fresh_ = true;  // nothing in line_ but its indent
};

/// At most `max_width` columns of each, without trailing spaces.
std::vector<std::string> render(const std::vector<Line>& lines, size_t max_width, bool colour);

}  // namespace lockstep::cli
