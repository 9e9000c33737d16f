#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::cli {

/// The flags of `lockstep compare`.
struct CompareOptions {
  int runs = 5;
  std::string out = "reports/compare";
  std::string title = "Comparison";
  std::vector<std::string> names = {};  ///< of the sides; empty: by the words in which they differ
};

CLI::App* add_compare_command(CLI::App& app, CompareOptions& options);

/// `lockstep compare`: runs the commands in turns, after one run of each that does not count, and
/// writes a report. `words` are the commands with the word vs between them, `command` is the whole
/// line that the user typed.
int run_compare(const CompareOptions& options, const std::vector<std::string>& words,
                const std::string& command);

}  // namespace lockstep::cli
