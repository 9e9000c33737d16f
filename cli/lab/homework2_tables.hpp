#pragma once

#include <string>

#include "cli/lab/homework2_results.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// Time, memory and stability of codes 1, 2 and 3, a column each.
Table codes_table(const Homework2Results& results);

/// Codes 1 and 3 for each ACCUM_STEPS.
Table accum_steps_table(const Homework2Results& results);

/// What a row of accum_steps_table shows: code 1 against its first point, code 3 against code 1.
std::string observe_fp32(const Homework2Results& results, const AccumPoint& point);
std::string observe_combined(const AccumPoint& point);

}  // namespace lockstep::cli
