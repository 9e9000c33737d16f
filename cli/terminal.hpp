#pragma once

#include <cstddef>
#include <string>

namespace lockstep::cli {

/// Whether this descriptor is a terminal on which lines can be drawn over: not TERM=dumb.
bool can_redraw(int descriptor);

/// Whether the locale of the environment writes UTF-8.
bool locale_is_utf8();

/// How far a list of tasks has come.
struct ProgressState {
  size_t done = 0;  ///< tasks that have ended
  size_t all = 1;
  double share = 0;  ///< of the work that is done
  std::string title = {};
  double seconds_left = 0;  ///< 0: not known yet
};

/// A bar, the number of the task that runs, its title and the time left, in at most `width`
/// columns: first the title is cut, then the bar is left out.
std::string progress_line(const ProgressState& state, size_t width, bool utf8);

}  // namespace lockstep::cli
