#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab10_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Schedules predicted above measured on one scale, bubble over micro-batches, time of schedules.
std::vector<Figure> lab10_figures(const Lab10Results& results);

/// The schedules with measured stage times as grids for the terminal.
std::vector<std::string> lab10_drawings(const Lab10Results& results);

}  // namespace lockstep::cli
