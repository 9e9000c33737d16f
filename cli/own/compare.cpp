#include "cli/own/compare.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <ctime>
#include <filesystem>

#include "base/process.hpp"
#include "cli/child.hpp"
#include "cli/doctor/facts.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_report.hpp"
#include "cli/own/comparison.hpp"
#include "launch/launcher.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kMostRuns = 1000;
constexpr std::chrono::hours kNoDeadline{24 * 365};

const std::vector<Example> kCompareExamples = {
    {"lockstep compare -- ./mine --batch 64 vs ./mine --batch 256", "which is faster"},
    {"lockstep compare --runs 10 --names dp,ddp -- ./dp vs lockstep run -n 2 ./ddp",
     "one process against two ranks"}};

// `lockstep` as a side is this very command, also where PATH does not lead to it.
std::string program_of(const ComparedSide& side) {
  const std::string& word = side.command.front();
  if (word == "lockstep") return fs::read_symlink("/proc/self/exe").string();
  return find_program(
      word, [](const char* name) { return std::getenv(name); }, program_folders());
}

ChildCommand child_of(const ComparedSide& side, const fs::path& record) {
  return {.program = program_of(side),
          .arguments = {side.command.begin() + 1, side.command.end()},
          .variables = {{"LOCKSTEP_RECORD", fs::absolute(record).string()}},
          .deadline = kNoDeadline};
}

// Runs one side once; its record, if it leaves one, is in records/.
double run_side(const SavedComparison& comparison, size_t side, size_t run, const fs::path& folder,
                const Interrupts& interrupts) {
  const fs::path record = folder / "records" / (compared_record(comparison, side, run) + ".json");
  std::error_code ignored;
  fs::remove(record, ignored);  // of an earlier comparison
  try {
    return run_child_or_throw(child_of(comparison.sides[side], record), interrupts).seconds;
  } catch (const ChildFailed& failed) {
    std::vector<std::string> notes = failed.notes();
    notes.push_back(fmt::format("what the finished runs left is in {}", folder.string()));
    throw ChildFailed(failed.message(), failed.help(), notes, failed.child_exit());
  }
}

void measure(SavedComparison& comparison, int runs, const fs::path& folder,
             const Interrupts& interrupts) {
  const size_t sides = comparison.sides.size();
  const size_t total = sides * static_cast<size_t>(runs + 1);
  size_t done = 0;
  const auto tell = [&](size_t side, const std::string& which, double seconds) {
    print_error(fmt::format("[{}/{}] {}, {}: {}\n", ++done, total, comparison.sides[side].name,
                            which, format_seconds(seconds)));
  };
  for (size_t side = 0; side < sides; ++side) {
    tell(side, "warm-up", run_side(comparison, side, 0, folder, interrupts));
  }
  for (int run = 0; run < runs; ++run) {
    for (size_t side = 0; side < sides; ++side) {
      const double seconds =
          run_side(comparison, side, static_cast<size_t>(run), folder, interrupts);
      comparison.sides[side].wall_s.push_back(seconds);
      tell(side, fmt::format("run {}", run + 1), seconds);
    }
    save_comparison(comparison, folder);
  }
}

}  // namespace

CLI::App* add_compare_command(CLI::App& app, CompareOptions& options) {
  auto* command = app.add_subcommand("compare", "measure commands against each other, in turns");
  command->footer(format_examples(kCompareExamples));
  command->add_option("--runs", options.runs, "timed runs per command, after one warm-up run")
      ->check(CLI::Range(2, kMostRuns).description(""))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--names", options.names, "of the commands, for the tables: a,b")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST");
  command->add_option("--out", options.out, "folder for the report, the tables and the records")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--title", options.title, "of the report")
      ->type_name("TEXT")
      ->capture_default_str();
  // For the usage line only: the commands are cut off before parsing.
  command->add_option("COMMANDS")
      ->description("./mine --a vs ./mine --b [vs ...]")
      ->type_name("")
      ->expected(0, 1);
  return command;
}

int run_compare(const CompareOptions& options, const std::vector<std::string>& words,
                const std::string& command) {
  SavedComparison comparison{.title = options.title,
                             .command = command,
                             .date = std::time(nullptr),
                             .sides = compared_sides(words, options.names)};
  for (const auto& side : comparison.sides) program_of(side);  // before anything is measured
  require_font();
  const fs::path folder = options.out;
  make_report_folder(folder);
  const FolderLock lock(folder.string());
  comparison.others_busy_cores = busy_cores();
  save_comparison(comparison, folder);
  const Interrupts interrupts;
  measure(comparison, options.runs, folder, interrupts);
  publish_report(comparison_report(comparison, folder),
                 {comparison.command, comparison.date, compared_records(comparison, folder)}, {},
                 folder);
  return 0;
}

}  // namespace lockstep::cli
