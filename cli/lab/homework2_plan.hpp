#pragma once

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// Plans the whole homework, before anything starts: code 1 (accumulation) and code 3 (with
/// autocast too) for each ACCUM_STEPS, code 2 (autocast), and the fp32 runs they are held against.
LabPlan plan_homework2(const LabOptions& options, const Hardware& hardware);

}  // namespace lockstep::cli
