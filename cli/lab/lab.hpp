#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/device_plan.hpp"
#include "lockstep/record.hpp"
#include "lockstep/table.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// A flag that belongs to some labs only. Its value is checked when the command line is parsed.
struct LabFlag {
  enum class Kind { kCount, kList, kNumber, kText };

  std::string name;  ///< "--ranks"
  Kind kind = Kind::kCount;
  std::string help;
  int64_t first = 1;  ///< smallest value of a count or of a list's elements
  int64_t last = 256;
  std::string values = "TEXT";  ///< of a text, in --help: "bf16|fp16"
};

/// The command line of `lockstep lab`. The lab chooses a size that is not given.
struct LabOptions {
  std::string devices = {};  ///< empty: the lab's own
  std::string out = {};      ///< empty: the lab's own folder
  bool quick = false;
  std::optional<int64_t> steps = {};
  std::optional<int64_t> batch = {};
  std::optional<int64_t> dim = {};
  std::optional<int64_t> hidden = {};
  std::optional<int64_t> depth = {};
  std::map<std::string, std::string> own = {};  ///< LabFlags that were given: {"--ranks", "1,2"}

  int repetitions() const { return quick ? 2 : 3; }

  /// The value of a LabFlag: "", none or an empty list where it was not given.
  std::string text(const std::string& flag) const;
  std::optional<int64_t> count(const std::string& flag) const;
  std::vector<int> list(const std::string& flag) const;

  /// The list in ascending order without duplicates, or `standard` where it was not given.
  std::vector<int> ascending(const std::string& flag, const std::vector<int>& standard) const;
};

/// Names a set-up of a lab by what it varies and how far: ("dp", 4) is DataParallel on 4 devices.
struct RunKey {
  std::string what;
  int64_t size = 0;

  bool operator==(const RunKey&) const = default;
};

/// One run of a program.
struct Experiment {
  std::vector<RunKey> keys;  ///< the set-ups that its record belongs to
  std::string name;          ///< of its record: "dp-cpu2-run1"
  std::string title;         ///< for people: "DataParallel on cpu:2, run 1 of 3"
  int devices = 1;           ///< logical devices it uses
  std::string program;
  int ranks = 0;                       ///< 0: started directly; else by `lockstep run`
  std::vector<std::string> arguments;  ///< all but --json
  std::vector<int> cores;              ///< cores it may use; empty: all
  double weight = 1;                   ///< how long it takes, relative to the others
};

struct LabPlan {
  int repetitions = 3;
  std::vector<Experiment> experiments;  ///< in the order in which they run
};

/// The repeated runs of one set-up.
struct RunSet {
  int devices = 1;
  std::vector<RunRecord> runs = {};  // [repetition]
  int64_t size = 0;                  ///< of its RunKey

  const RunRecord& first() const { return runs.front(); }
};

/// The records of a lab by the keys of their experiments.
struct LabRuns {
  std::map<std::string, std::vector<RunSet>> sets;  ///< [RunKey::what], ascending by size
  double others_busy_cores = 0;  ///< cores that other programs kept busy when the lab began
  LabOptions options = {};       ///< what the lab was asked for

  void add(const Experiment& experiment, const RunRecord& record);

  /// All set-ups that vary this; none where nothing did.
  const std::vector<RunSet>& all(const std::string& what) const;

  /// The same, but if there is none, the folder of the lab is incomplete: an Error.
  const std::vector<RunSet>& some(const std::string& what) const;

  /// The smallest of them, or the one of this size. A missing one is an Error, too.
  const RunSet& of(const std::string& what) const;
  const RunSet& of(const std::string& what, int64_t size) const;
};

/// One question of the course, answered from the run's own figures.
struct Answer {
  std::string topic;  ///< "speed", "splitting", "bottleneck"
  std::string question;
  std::string text;
};

struct NamedTable {
  std::string name;  ///< of its CSV file
  Table table;
};

/// The source of a program that was run.
struct SourceListing {
  std::string name;  ///< of its file: "homework2_combined.cpp"
  std::string text;
  bool printed = true;  ///< in the report; else only a file beside it
};

/// The source of a program of the course, as it was when lockstep was built. `program` is its name
/// without ".cpp". cmake/embed_sources.cmake writes the definition.
SourceListing course_source(const std::string& program);

/// Names and values, such as {"seed", "0"}.
using LabFacts = std::vector<std::pair<std::string, std::string>>;

/// What a lab found out.
struct LabReport {
  std::string title;
  RunRecord stamp;           ///< a run whose host and versions are those of all
  LabFacts trained = {};     ///< what was trained, and the command that repeats the lab
  std::string warning = {};  ///< why times cannot be judged, said once; empty: they can
  std::vector<NamedTable> tables;
  std::vector<Figure> figures;
  std::vector<Answer> answers;
  std::vector<std::string> drawings = {};  ///< for the terminal, instead of figures
  std::vector<SourceListing> code = {};    ///< to hand in with the report
};

struct LabExample {
  std::string arguments;  ///< after `lockstep lab NAME`
  std::string meaning;
};

/// Everything that makes one lab differ from another.
struct Lab {
  std::string name;    ///< the word after `lockstep lab`
  std::string folder;  ///< of its report, where the user names none
  std::vector<LabFlag> flags;
  std::vector<LabExample> examples;
  std::function<LabPlan(const LabOptions&, const Hardware&)> plan;
  std::function<LabReport(const LabRuns&)> report;
};

}  // namespace lockstep::cli
