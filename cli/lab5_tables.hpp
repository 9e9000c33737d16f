#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/lab5_results.hpp"
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

/// "41.2 ± 0.8 ms": mean and deviation in one unit.
std::string format_step_ms(double mean_ms, double stddev_ms);

/// "22 22 20".
std::string format_rows(const std::vector<int64_t>& rows);

}  // namespace lockstep::cli
