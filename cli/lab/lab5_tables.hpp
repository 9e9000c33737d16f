#pragma once

#include "cli/lab/lab5_results.hpp"
#include "lockstep/table.hpp"

namespace lockstep::cli {

/// Set-up, devices, step time, total time, speed-up, whether it is proportional.
Table speed_table(const Lab5Results& results);

/// Peak and final memory per device, and how it differs from device 0's.
Table memory_table(const Lab5Results& results);

/// Rows per device as measured, beside torch.chunk's rule.
Table split_table(const Lab5Results& results);

/// What each device does and holds in the full DataParallel run.
Table bottleneck_table(const Lab5Results& results);

}  // namespace lockstep::cli
