#pragma once

#include <string>
#include <vector>

#include "launch/plan.hpp"

namespace lockstep {

/// The path of the plan's program: a name without a slash is looked for in PATH, then in
/// more_folders. A program that does not exist, is a folder or is not executable is an Error
/// (kLaunch) with its remedy; so is a Python file that cannot be read.
std::string find_program(const LaunchPlan& plan, const VariableLookup& lookup,
                         const std::vector<std::string>& more_folders);

/// The same for a program's name: a path, or a word to look for.
std::string find_program(const std::string& name, const VariableLookup& lookup,
                         const std::vector<std::string>& more_folders);

/// Executes the plan and returns the exit code: 0, 75 if ranks were preempted, the culprit's own,
/// 128 + signal, or 1 if a host was lost or too few came for a restart. Throws only before anything
/// was started.
int launch(const LaunchPlan& plan, const std::string& program);

/// This machine's name.
std::string host_name();

}  // namespace lockstep
