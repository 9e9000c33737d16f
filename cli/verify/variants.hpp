#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/child.hpp"
#include "cli/verify/judge.hpp"

namespace lockstep::cli {

/// Whether a command line has this flag, as "--batch 60" or "--batch=60".
bool names_flag(const std::vector<std::string>& words, const std::string& flag);

/// The flags of a program, as its --help lists them.
struct ProgramFlags {
  std::map<std::string, std::string> defaults;              ///< [flag] "" if there is none
  std::map<std::string, std::vector<std::string>> choices;  ///< [flag] of "off|bf16|fp16"

  bool has(const std::string& flag) const { return defaults.contains(flag); }

  /// What a command line gives a flag, or its default; 0 if that is no number.
  int64_t number(const std::vector<std::string>& words, const std::string& flag) const;
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

/// The folder of all recordings of a command. It goes when this ends, however that comes about,
/// unless it is kept.
class RecordingsFolder {
 public:
  RecordingsFolder(std::filesystem::path path, bool keep);
  ~RecordingsFolder();
  RecordingsFolder(const RecordingsFolder&) = delete;
  RecordingsFolder& operator=(const RecordingsFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  bool is_kept() const { return keep_; }

 private:
  std::filesystem::path path_;
  bool keep_;
};

/// Runs a program. Each run's recording has a folder of its own, named after its variant.
class VerifyRunner {
 public:
  VerifyRunner(std::vector<std::string> program, const RecordingsFolder& recordings,
               const Interrupts& interrupts);

  /// The flags of its --help; none if it does not answer.
  ProgramFlags flags() const;

  /// What a run left: its recording, or how it failed.
  struct Outcome {
    std::filesystem::path recording;
    int exit_code = 0;
    std::string errors;
    double seconds = 0;

    /// Whether a rank could not write its recording, as on a full disk.
    bool lacks_space() const;
  };

  /// `variables` are added to those of a recording. Ranks that make no progress for `limit` are
  /// stopped, and so is a run that takes three times as long, which is an Error.
  Outcome run(const Variant& variant, const std::vector<std::string>& family_arguments,
              std::map<std::string, std::string> variables = {},
              std::chrono::seconds limit = kLongestRun) const;

  /// Removes a recording that was judged, unless it is kept.
  void discard(const Outcome& outcome) const;

  static constexpr std::chrono::seconds kLongestRun{1800};

 private:
  std::filesystem::path new_folder(const Variant& variant) const;

  std::string path_;
  std::vector<std::string> arguments_;
  const RecordingsFolder& recordings_;
  const Interrupts& interrupts_;
};

}  // namespace lockstep::cli
