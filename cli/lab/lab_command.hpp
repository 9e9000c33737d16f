#pragma once

#include <string>

#include "cli/command_info.hpp"
#include "cli/lab/lab.hpp"
#include "cli/lab/lab_report.hpp"

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What `lockstep lab` was asked for.
struct LabRequest {
  std::string number;  ///< a lab's name, or "all"
  LabOptions options;
  HandIn hand_in = {};
};

/// The lab of this name; an unknown one is an Error that lists all labs.
const Lab& lab_named(const std::string& name);

CLI::App* add_lab_command(CLI::App& app, LabRequest& request);

/// Narrows the help of `lockstep lab` to the lab that was named on the command line, if one was.
void show_flags_of_named_lab(CLI::App& command);

/// `lockstep lab` with a command for each lab, and the flags that all of them have.
CommandInfo describe_lab_command(CLI::App& command);

/// Runs the lab of that name, or all of them. `command` is the line that the user typed.
int run_lab_command(const LabRequest& request, const std::string& command);

}  // namespace lockstep::cli
