#pragma once

#include "cli/lab/lab6_results.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// Processes, data split, device use, memory, step time and scaling of both methods.
Table methods_table(const Lab6Results& results);

/// What each device does and holds under both methods.
Table balance_table(const Lab6Results& results);

/// When each bucket of the last step was launched and finished, against the end of backward.
Table overlap_table(const Lab6Results& results);

/// Communication of a step for each number of ranks: total, hidden, exposed.
Table communication_table(const Lab6Results& results);

/// Speed-up and efficiency of both methods over one rank or device.
Table scaling_table(const Lab6Results& results);

}  // namespace lockstep::cli
