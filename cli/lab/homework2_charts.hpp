#pragma once

#include <vector>

#include "cli/lab/homework2_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Time and memory over ACCUM_STEPS.
std::vector<Figure> homework2_figures(const Homework2Results& results);

}  // namespace lockstep::cli
