#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/lab/lab.hpp"
#include "cli/verify/variants.hpp"

namespace CLI {
class App;
}

namespace lockstep::cli {

/// The command line of `lockstep verify`.
struct VerifyOptions {
  bool quick = false;
  std::vector<int> ranks = {};
  std::string out = "reports/verify";
  std::string mutate = {};  ///< "all", or names
  int clean = 0;            ///< clean runs to look for false alarms in
  bool keep = false;        ///< the recordings
};

CLI::App* add_verify_command(CLI::App& app, VerifyOptions& options);

/// Verifies `program`, plants bugs, or counts false alarms, as the options say. Returns 0, or 1 if
/// a run is wrong, a bug escaped or an alarm was false.
int run_verify(const VerifyOptions& options, const std::vector<std::string>& program,
               const std::string& command);

/// One line of the table of a verification.
struct VerifiedRun {
  std::string family;
  std::string name;
  std::string refusal = {};  ///< why the program did not run so, by its exit code 2; empty: it ran
  Judgement judgement = {};
  double seconds = 0;
};

/// The runs of one rank that others are compared with: themselves, and how far rounding grows.
struct Baseline {
  std::unique_ptr<TracedRun> reference;
  RoundingGrowth growth;
  std::optional<Divergence> flaw;  ///< why no run can be compared with it
  std::string dtype;
  double seconds = 0;
};

/// Runs the reference, once more to see that it repeats itself, and `perturbed` times with weights
/// that begin one unit in the last place away. A program that fails is an Error that quotes it.
Baseline make_baseline(const VerifyRunner& runner, const std::vector<std::string>& arguments,
                       int perturbed);

/// Runs a variant and judges it. A run that fails is wrong, with what the program said.
VerifiedRun verify_variant(const VerifyRunner& runner, const Baseline& baseline,
                           const Family& family, const Variant& variant,
                           const std::map<std::string, std::string>& variables = {});

/// Whether a tensor of any run was compared with the reference.
bool any_compared(const std::vector<VerifiedRun>& runs);

/// Whether one of the runs is wrong.
bool any_wrong(const std::vector<VerifiedRun>& runs);

/// The tables and answers of a verification, for the terminal and the report.
LabReport verify_report(const std::vector<std::string>& program,
                        const std::vector<VerifiedRun>& runs);

/// Plants bugs in lockstep's own programs: `names` is "all" or a list. Returns the exit code.
int run_mutations(const VerifyOptions& options, const std::string& command);

/// Compares the course's methods with training on one device, and writes the report into the
/// folder.
int run_equivalence(const std::filesystem::path& folder, const std::string& command);

/// Verifies unspoiled models of every kind until so many runs were judged.
int run_clean(const VerifyOptions& options, const std::string& command);

}  // namespace lockstep::cli
