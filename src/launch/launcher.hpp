#pragma once

#include <string>

#include "launch/plan.hpp"

namespace lockstep {

/// The path of the plan's program. A program that does not exist, is a folder or is not executable
/// is an Error (kLaunch) with its remedy; so is a Python file that cannot be read.
std::string find_program(const LaunchPlan& plan, const VariableLookup& lookup);

/// The same for a program's name: a path, or a word to look for in PATH.
std::string find_program(const std::string& name, const VariableLookup& lookup);

/// Executes the plan and returns the exit code: 0, 75 if ranks were preempted, the culprit's own,
/// or 128 + signal. Throws only before anything was started.
int launch(const LaunchPlan& plan, const std::string& program);

/// This machine's name.
std::string host_name();

}  // namespace lockstep
