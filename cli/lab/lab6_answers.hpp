#pragma once

#include <vector>

#include "cli/lab/lab6_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Every question of practical 6. What this run cannot show, its answer says.
std::vector<Answer> answer_lab6(const Lab6Results& results);

}  // namespace lockstep::cli
