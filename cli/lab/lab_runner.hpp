#pragma once

#include <string>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// Plans a lab, runs its experiments, prints tables and answers, and writes the report (HTML, PDF,
/// Markdown, CSV) into options.out. `command` is the line that the user typed.
int run_lab(const Lab& lab, const LabOptions& options, const std::string& command);

}  // namespace lockstep::cli
