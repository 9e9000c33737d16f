#pragma once

#include <filesystem>

#include "cli/lab/lab.hpp"
#include "cli/lab/lab_report.hpp"

namespace lockstep::cli {

/// Makes the folder and its records/, and checks that files can be written there. An Error names
/// the folder and the reason.
void make_report_folder(const std::filesystem::path& folder);

/// Prints tables and answers and writes them into the folder, as a lab does.
void publish_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                    const std::filesystem::path& folder);

}  // namespace lockstep::cli
