#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace lockstep {

/// Cuts what a process writes into lines. A line longer than the bound comes in several pieces, so
/// that a program that never ends a line costs no memory.
class LineSplitter {
 public:
  /// `end` is '\n', or '\r' for a line that the program is going to overwrite.
  using Sink = std::function<void(std::string_view line, char end)>;

  static constexpr size_t kLongestLine = 16384;

  void add(std::string_view bytes, const Sink& sink);

  /// What stands after the last line's end.
  void finish(const Sink& sink);

 private:
  std::string line_;
  bool returned_ = false;  // a '\r' ended line_; a '\n' right after it makes one line's end of both
};

}  // namespace lockstep
