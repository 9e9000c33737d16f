#pragma once

#include <ctime>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"
#include "report/document.hpp"

namespace lockstep::cli {

/// A lab's report as a document: environment, measurements, a section for each topic of questions,
/// and links to records/<name>.json.
Document lab_document(const LabReport& report, const std::string& command, std::time_t date,
                      const std::vector<std::string>& record_names);

/// Prints tables, drawings and answers, and writes the tables as CSV files into the folder.
void print_lab(const LabReport& report, const std::string& folder);

}  // namespace lockstep::cli
