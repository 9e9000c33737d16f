#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/top/top_sample.hpp"

namespace lockstep::cli {

/// How to draw. Drawing depends on nothing else of the terminal.
struct DrawStyle {
  size_t width = 80;   ///< no line is wider
  bool utf8 = true;    ///< block characters; ASCII otherwise
  bool colour = true;  ///< ANSI colours
};

/// Draws the GPUs, then every run with its ranks and devices, on one or a few lines each. Memory
/// bars of one run share a scale, its largest peak, so that uneven devices stand out.
std::vector<std::string> draw_runs(const TopView& view, const DrawStyle& style);

/// The same under a title, for a screen of `height` lines; a last line counts what does not fit.
std::vector<std::string> draw_screen(const TopView& view, double interval_s, size_t height,
                                     const DrawStyle& style);

/// One plain line per GPU and per rank, for output that is not a terminal.
std::vector<std::string> rank_lines(const TopView& view);

/// The text to show if there is no run.
std::string no_run_text();

/// "▁▄█": fractions as the last `width` samples, the newest at the right, padded on the left.
std::string sparkline(const std::vector<double>& fractions, size_t width, bool utf8);

/// One object: {"schema", "runs": [{…, "ranks": [{…, "devices": […]}]}], "gpus": […]}. Unknown
/// values are null; a loss that is not finite is the text "nan", "inf" or "-inf", as in records.
nlohmann::json top_json(const TopView& view);

/// Makes a text safe for a terminal: control characters and broken UTF-8 become '?', and so does
/// everything but ASCII if not `utf8`.
std::string printable(const std::string& text, bool utf8);

}  // namespace lockstep::cli
