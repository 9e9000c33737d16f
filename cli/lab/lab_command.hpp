#pragma once

#include <string>

#include "cli/lab/lab_plan.hpp"

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What `lockstep lab` was asked for.
struct LabRequest {
  std::string number;  ///< "5", "homework2", "all"
  LabOptions options;
};

CLI::App* add_lab_command(CLI::App& app, LabRequest& request);

/// Runs the lab of that number, or all of them. `command` is the line the user typed.
int run_lab_command(const LabRequest& request, const std::string& command);

}  // namespace lockstep::cli
