#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/child.hpp"
#include "cli/verify/judge.hpp"

namespace lockstep::cli {

/// The flags of a program, as its --help lists them.
struct ProgramFlags {
  std::map<std::string, std::string> defaults;              ///< [flag] "" where there is none
  std::map<std::string, std::vector<std::string>> choices;  ///< [flag] of "off|bf16|fp16"

  bool has(const std::string& flag) const { return defaults.contains(flag); }
};

ProgramFlags parse_help(const std::string& help);

/// A way to run the program that must train as its reference does.
struct Variant {
  std::string name;
  std::string family = {};  ///< of runs that are compared with one reference
  int ranks = 1;
  std::vector<std::string> arguments = {};  ///< that it adds to the family's
  std::vector<std::string> launch = {};     ///< flags of `lockstep run`
  bool saves = false;                       ///< it gets a folder for checkpoints
  RunFacts facts = {};
};

/// One rank, and the variants that are compared with it.
struct Family {
  std::string name;
  std::vector<std::string> arguments;
  std::vector<Variant> variants;
};

/// What `lockstep verify` was asked for.
struct VerifyRequest {
  std::vector<std::string> program;  ///< with its arguments
  bool quick = false;
  std::vector<int> ranks = {};  ///< none: 2, 3 and 5, or 2 and 3 with `quick`
};

/// Chooses what the program offers: numbers of ranks or devices, accumulation, sharding, schedules,
/// tensor parallelism, lower precision, a kill and a resume.
std::vector<Family> plan_variants(const VerifyRequest& request, const ProgramFlags& flags);

/// Runs programs and keeps their recordings below a folder.
class VerifyRunner {
 public:
  VerifyRunner(std::vector<std::string> program, std::filesystem::path folder,
               const Interrupts& interrupts);

  /// The flags of its --help; none if it does not answer.
  ProgramFlags flags() const;

  /// What a run left: its recording, or how it failed.
  struct Outcome {
    std::filesystem::path recording;
    int exit_code = 0;
    std::string errors;
    double seconds = 0;
  };

  /// `variables` are added to those of a recording.
  Outcome run(const Variant& variant, const std::vector<std::string>& family_arguments,
              std::map<std::string, std::string> variables = {}) const;

 private:
  std::string path_;
  std::vector<std::string> arguments_;
  std::filesystem::path folder_;
  const Interrupts& interrupts_;
  mutable int runs_ = 0;
};

}  // namespace lockstep::cli
