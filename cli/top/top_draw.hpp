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

/// The GPUs, on one or a few lines each.
std::vector<std::string> draw_gpus(const TopView& view, const DrawStyle& style);

/// A run with its ranks and devices, on one or a few lines each. Memory bars share a scale, the
/// run's largest peak, so that uneven devices stand out.
std::vector<std::string> draw_run(const RunView& run, const DrawStyle& style);

/// The run on one line: name, trouble, ranks, and how far its first rank has come.
std::string draw_folded_run(const RunView& run, const DrawStyle& style);

/// The GPUs, then every run.
std::vector<std::string> draw_runs(const TopView& view, const DrawStyle& style);

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
