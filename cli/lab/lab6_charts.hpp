#pragma once

#include <vector>

#include "cli/lab/lab6_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Step time and peak memory of DP beside DDP; the buckets of one step against its backward, where
/// gradients were communicated.
std::vector<Figure> lab6_figures(const Lab6Results& results);

}  // namespace lockstep::cli
