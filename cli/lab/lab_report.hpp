#pragma once

#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"
#include "report/document.hpp"

namespace lockstep::cli {

/// The author of a report that is handed in, and what is handed in.
struct HandIn {
  std::string author = {};
  std::string notes =
      {};            ///< file of the author's notes; "": the folder's notes.md, if there is one
  bool zip = false;  ///< also writes hand-in.zip
};

/// How the figures of a report came about.
struct ReportOrigin {
  std::string command;  ///< the line that the user typed
  std::time_t date = 0;
  std::vector<std::string> records;  ///< names of the files in records/, without .json
};

/// A lab's report as a document: environment, what was trained, measurements, a section for each
/// topic of questions, code, and links to records/<name>.json. Questions have the numbers of the
/// course's page where it has any, else those of their topic and their own: "2.1".
Document lab_document(const LabReport& report, const std::string& command, std::time_t date,
                      const std::vector<std::string>& record_names);

/// Writes everything that a report's folder holds but for the records: HTML, PDF, Markdown with its
/// figures, code, tables as CSV and JSON, a file for notes if there is none, and hand-in.zip if
/// asked for. Notes that do not fit are an Error, and then the report is there without them. An
/// Error about a file that cannot be written says how to make the report again from the records.
void write_lab_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                      const std::string& folder);

/// Makes the folder and its records/, and checks that files can be written there. An Error names
/// the folder and the reason.
void make_report_folder(const std::filesystem::path& folder);

/// Prints tables, drawings and answers, writes the report, and prints where it lies.
void publish_report(const LabReport& report, const ReportOrigin& origin, const HandIn& hand_in,
                    const std::filesystem::path& folder);

/// Refuses notes that cannot be read, before anything is measured.
void require_notes(const HandIn& hand_in);

}  // namespace lockstep::cli
