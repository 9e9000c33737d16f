#pragma once

#include <string>

#include "launch/plan.hpp"

namespace lockstep {

/// Does what the plan says and gives the exit code: 0, 75 where ranks were preempted, the culprit's
/// own, or 128 + signal. Errors escape only before anything was started.
int launch(const LaunchPlan& plan, const std::string& program);

/// Random hexadecimal digits.
std::string random_hex(int digits);

/// This machine's name.
std::string host_name();

}  // namespace lockstep
