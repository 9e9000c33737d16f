#pragma once

#include <vector>

#include "cli/lab/lab7_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Speed, memory and loss curves of practical 7.
std::vector<Figure> lab7_figures(const Lab7Results& results);

}  // namespace lockstep::cli
