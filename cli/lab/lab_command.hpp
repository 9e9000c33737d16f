#pragma once

#include <string>

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

/// Runs the lab of that name, or all of them. `command` is the line that the user typed.
int run_lab_command(const LabRequest& request, const std::string& command);

}  // namespace lockstep::cli
