#pragma once

#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// What a report says of itself.
struct ReportDetails {
  std::string command;
  std::time_t date = 0;
  std::vector<std::string> records;  ///< names of files in the folder's records/
};

/// Makes the folder and its records/, and checks that files can be written there. An Error names
/// the folder and the reason.
void make_report_folder(const std::filesystem::path& folder);

/// Prints tables and answers and writes them into the folder, as a lab does.
void publish_report(const LabReport& report, const ReportDetails& details,
                    const std::filesystem::path& folder);

}  // namespace lockstep::cli
