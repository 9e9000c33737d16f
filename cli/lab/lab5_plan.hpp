#pragma once

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// Plans the whole lab, before anything starts. A bad --devices is an Error.
LabPlan plan_lab5(const LabOptions& options, const Hardware& hardware);

}  // namespace lockstep::cli
