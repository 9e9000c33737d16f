#pragma once

#include <vector>

#include "cli/lab/lab7_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Every question of practical 7. What this run cannot show, its answer says.
std::vector<Answer> answer_lab7(const Lab7Results& results);

}  // namespace lockstep::cli
