#pragma once

#include <string>

#include "launch/plan.hpp"

namespace lockstep {

/// The path that will be executed. A program that is not there, is a folder or may not be executed
/// is an Error (kLaunch) with its remedy; so is a Python file that cannot be read.
std::string find_program(const LaunchPlan& plan, const VariableLookup& lookup);

}  // namespace lockstep
