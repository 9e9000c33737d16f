#pragma once

#include <string>

#include "cli/lab/lab.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Plans a lab, runs its experiments, prints tables and answers, and writes the report (HTML, PDF,
/// Markdown, CSV) into options.out. `command` is the line that the user typed.
int run_lab(const Lab& lab, const LabOptions& options, const HandIn& hand_in,
            const std::string& command);

}  // namespace lockstep::cli
