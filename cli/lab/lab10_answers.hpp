#pragma once

#include <vector>

#include "cli/lab/lab10_results.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Every question of practical 10. What this run cannot show, its answer says.
std::vector<Answer> answer_lab10(const Lab10Results& results);

/// Those of parts 10.1 to 10.5, and those on schedules, axes and losses.
std::vector<Answer> answer_lab10_parts(const Lab10Results& results);
std::vector<Answer> answer_lab10_schedules(const Lab10Results& results);

}  // namespace lockstep::cli
