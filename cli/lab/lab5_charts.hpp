#pragma once

#include <vector>

#include "cli/lab/lab5_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Step time over devices beside the ideal; peak memory of each device.
std::vector<Figure> lab5_figures(const Lab5Results& results);

}  // namespace lockstep::cli
