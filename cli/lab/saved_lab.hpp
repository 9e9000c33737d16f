#pragma once

#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// What a lab writes to lab.json, beside its records, so that its report can be made again.
struct SavedLab {
  std::string lab;      ///< the word after `lockstep lab`
  std::string command;  ///< the line that the user typed
  std::time_t date = 0;
  double others_busy_cores = 0;
  LabOptions options;
  std::vector<Experiment> experiments;  ///< name, keys and devices
  std::string author = {};              ///< who hands the report in; may be empty
};

inline constexpr const char* kSavedLab = "lab.json";

void save_lab(const SavedLab& lab, const std::filesystem::path& folder);

/// Reads lab.json of a lab's folder. A file of another schema or with a missing field is an Error.
SavedLab read_saved_lab(const std::filesystem::path& folder);

/// The lab's runs from the records in its folder. A missing record is an Error.
LabRuns saved_runs(const SavedLab& lab, const std::filesystem::path& folder);

}  // namespace lockstep::cli
