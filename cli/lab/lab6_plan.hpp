#pragma once

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// Plans the whole lab, before anything starts: one device alone, then DataParallel and DDP on the
/// same devices, for each number of ranks. Ranks without a device each are an Error.
LabPlan plan_lab6(const LabOptions& options, const Hardware& hardware);

}  // namespace lockstep::cli
