#pragma once

#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// One of the commands that are compared.
struct ComparedSide {
  std::string name;                  ///< in tables
  std::vector<std::string> command;  ///< program and arguments
  std::vector<double> wall_s = {};   ///< [run]
};

/// What `lockstep compare` measured. It is kept as compare.json beside the records.
struct SavedComparison {
  std::string title;
  std::string command;  ///< the line that the user typed
  std::time_t date = 0;
  double others_busy_cores = 0;  ///< when it began
  std::vector<ComparedSide> sides;
  std::string author = {};  ///< who hands the report in; may be empty
};

inline constexpr const char* kSavedComparison = "compare.json";

/// Splits `./mine --a vs ./mine --b` and names the sides by the words in which they differ, or as
/// `names` says. Fewer than two sides, an empty one or another number of names is an Error.
std::vector<ComparedSide> compared_sides(const std::vector<std::string>& words,
                                         const std::vector<std::string>& names = {});

/// The name of a run's record: "1-a-run2".
std::string compared_record(const SavedComparison& comparison, size_t side, size_t run);

void save_comparison(const SavedComparison& comparison, const std::filesystem::path& folder);

/// Reads compare.json of a folder. A file of another schema or with a missing field is an Error.
SavedComparison read_comparison(const std::filesystem::path& folder);

/// The names of those records that exist in the folder.
std::vector<std::string> compared_records(const SavedComparison& comparison,
                                          const std::filesystem::path& folder);

/// Wall times, and what the records in the folder say where every run of a side has left one.
LabReport comparison_report(const SavedComparison& comparison, const std::filesystem::path& folder);

}  // namespace lockstep::cli
