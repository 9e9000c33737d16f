#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/top/top_sample.hpp"

namespace lockstep::cli {

/// How to draw: nothing else of the terminal is looked at.
struct DrawStyle {
  size_t width = 80;   ///< no line is wider
  bool utf8 = true;    ///< block characters; ASCII otherwise
  bool colour = true;  ///< ANSI colours
};

/// The GPUs, then every run with its ranks and devices, a line each or a few, none with a line
/// break. Memory bars of one run share a scale, its largest peak, so that uneven devices stand out.
std::vector<std::string> draw_runs(const TopView& view, const DrawStyle& style);

/// The same under a title, for a screen of `height` lines: what does not fit is counted.
std::vector<std::string> draw_screen(const TopView& view, double interval_s, size_t height,
                                     const DrawStyle& style);

/// One plain line per GPU and per rank, for output that is not a terminal.
std::vector<std::string> rank_lines(const TopView& view);

/// What is shown where no run is going on.
std::string no_run_text();

/// "▁▄█": fractions as the last `width` samples, the newest at the right, padded on the left.
std::string sparkline(const std::vector<double>& fractions, size_t width, bool utf8);

}  // namespace lockstep::cli
