#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_report.hpp"

namespace CLI {
class App;
}

namespace lockstep::cli {

/// What `lockstep report` was asked for.
struct ReportOptions {
  std::vector<std::string> paths;  ///< folders, and files with records
  std::string out = {};            ///< empty: the folder itself, or reports/own for records
  std::string title = {};          ///< empty: the lab's, or "Runs"
  HandIn hand_in = {};
};

CLI::App* add_report_command(CLI::App& app, ReportOptions& options);

/// `lockstep report`: makes a report from records alone. A folder of a lab or of `lockstep compare`
/// gives the report that it had; other records give tables of what they hold. `command` is the line
/// that the user typed.
int run_report(const ReportOptions& options, const std::string& command);

}  // namespace lockstep::cli
