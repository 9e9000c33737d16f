#pragma once

#include <vector>

#include "cli/lab/lab5_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Every question of practical 5. What this run cannot show, its answer says.
std::vector<Answer> answer_lab5(const Lab5Results& results);

}  // namespace lockstep::cli
