#pragma once

#include "cli/lab/lab_plan.hpp"

namespace lockstep::cli {

/// Plans the whole lab, before anything starts: the five parts once each, a run on one device that
/// their losses must equal, and schedules against each other in turns. The hardware that --devices
/// names is divided into as many logical devices as a run has stages on ranks.
LabPlan plan_lab10(const LabOptions& options, const Hardware& hardware);

}  // namespace lockstep::cli
