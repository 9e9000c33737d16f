#pragma once

#include "launch/plan_reader.hpp"

namespace lockstep {

/// Plans how many hosts there are, where and how long they wait for each other, and when one counts
/// as lost; for one host, MASTER_ADDR and MASTER_PORT.
void plan_hosts(PlanReader& reader, LaunchPlan& plan);

}  // namespace lockstep
