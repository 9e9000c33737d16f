#pragma once

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// Plans the whole lab, before anything starts: fp32 alone; accumulation with and without no_sync,
/// undivided, and as one large batch; autocast with and without a scaler, with and without a
/// planted overflow; both together. A rank on each device.
LabPlan plan_lab7(const LabOptions& options, const Hardware& hardware);

}  // namespace lockstep::cli
