#include "cli/own/report_command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <filesystem>
#include <regex>
#include <system_error>

#include "base/file.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/lab_command.hpp"
#include "cli/lab/lab_report.hpp"
#include "cli/lab/saved_lab.hpp"
#include "cli/own/comparison.hpp"
#include "cli/own/run_report.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecordsFolder = "reports/own";
const std::vector<Example> kReportExamples = {
    {"lockstep report reports/lab5", "the lab's report again, from its records"},
    {"lockstep report run.json --out today", "a run of your own"},
    {"lockstep report a-run1.json a-run2.json b.json", "two runs of one set-up, and another"}};

// A file with a record, and the name that it gets in the report.
struct NamedRecord {
  fs::path path;
  std::string name;
};

std::vector<fs::path> records_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::path& source : {folder / "records", folder}) {
    if (!fs::is_directory(source)) continue;
    for (const auto& entry : fs::directory_iterator(source)) {
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    }
    if (!files.empty()) break;
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    throw Error(Code::kFileRead,
                fmt::format("there is no record in the folder {}", folder.string()),
                "name a file that a program wrote with --json or LOCKSTEP_RECORD, or the folder of "
                "a lab or of lockstep compare");
  }
  return files;
}

// Two files of one name are told apart by their number.
std::vector<NamedRecord> named_records(const std::vector<std::string>& paths) {
  std::vector<fs::path> files;
  for (const fs::path path : paths) {
    if (fs::is_directory(path)) {
      for (auto& file : records_in(path)) files.push_back(std::move(file));
    } else {
      files.push_back(path);
    }
  }
  std::vector<NamedRecord> records;
  for (const auto& file : files) {
    const std::string stem = file.stem().string();
    std::string name = stem;
    const auto taken = [&name](const NamedRecord& other) { return other.name == name; };
    for (int i = 2; std::any_of(records.begin(), records.end(), taken); ++i) {
      name = fmt::format("{}-{}", stem, i);
    }
    records.push_back({file, name});
  }
  return records;
}

// Runs of one set-up are told by their names: base-run1, base-run2 and so on.
std::vector<NamedRuns> grouped_runs(const std::vector<NamedRecord>& records) {
  static const std::regex kRun("(.+)-run[0-9]+");
  std::vector<NamedRuns> runs;
  for (const auto& [path, name] : records) {
    std::smatch parts;
    const std::string set_up = std::regex_match(name, parts, kRun) ? parts[1].str() : name;
    auto known = std::find_if(runs.begin(), runs.end(),
                              [&set_up](const NamedRuns& other) { return other.name == set_up; });
    if (known == runs.end()) known = runs.insert(runs.end(), {set_up, {}});
    known->set_up.runs.push_back(read_record(path.string()));
    known->set_up.devices = static_cast<int>(known->set_up.first().devices.size());
  }
  return runs;
}

// Beside the report, so that its folder holds all that it is made from.
void copy_records(const std::vector<NamedRecord>& records, const fs::path& folder) {
  for (const auto& [path, name] : records) {
    const fs::path target = folder / "records" / (name + ".json");
    std::error_code ignored;
    if (fs::equivalent(path, target, ignored)) continue;
    write_file_atomically(target.string(), read_text_file(path.string()));
  }
}

void copy_records(const std::vector<std::string>& names, const fs::path& from, const fs::path& to) {
  std::vector<NamedRecord> records;
  for (const auto& name : names) records.push_back({from / "records" / (name + ".json"), name});
  copy_records(records, to);
}

// The author that is given counts, and is kept for the next report; else the one that was kept.
HandIn with_author(HandIn hand_in, std::string& kept) {
  if (hand_in.author.empty()) {
    hand_in.author = kept;
  } else {
    kept = hand_in.author;
  }
  return hand_in;
}

int report_lab(const fs::path& folder, const fs::path& out, const ReportOptions& options) {
  SavedLab saved = read_saved_lab(folder);
  const HandIn hand_in = with_author(options.hand_in, saved.author);
  LabReport report = lab_named(saved.lab).report(saved_runs(saved, folder));
  if (!options.title.empty()) report.title = options.title;
  std::vector<std::string> names;
  for (const auto& experiment : saved.experiments) names.push_back(experiment.name);
  make_report_folder(out);
  const FolderLock lock(out.string());
  copy_records(names, folder, out);
  save_lab(saved, out);
  publish_report(report, {saved.command, saved.date, names}, hand_in, out);
  return 0;
}

int report_comparison(const fs::path& folder, const fs::path& out, const ReportOptions& options) {
  SavedComparison saved = read_comparison(folder);
  const HandIn hand_in = with_author(options.hand_in, saved.author);
  if (!options.title.empty()) saved.title = options.title;
  const LabReport report = comparison_report(saved, folder);
  const auto names = compared_records(saved, folder);
  make_report_folder(out);
  const FolderLock lock(out.string());
  copy_records(names, folder, out);
  save_comparison(saved, out);
  publish_report(report, {saved.command, saved.date, names}, hand_in, out);
  return 0;
}

int report_records(const ReportOptions& options, const std::string& command) {
  const auto records = named_records(options.paths);
  const LabReport report =
      report_on_runs(options.title.empty() ? "Runs" : options.title, grouped_runs(records));
  const fs::path out = options.out.empty() ? kRecordsFolder : options.out;
  make_report_folder(out);
  const FolderLock lock(out.string());
  copy_records(records, out);
  std::vector<std::string> names;
  for (const auto& record : records) names.push_back(record.name);
  publish_report(report, {command, std::time(nullptr), names}, options.hand_in, out);
  return 0;
}

}  // namespace

CLI::App* add_report_command(CLI::App& app, ReportOptions& options) {
  auto* command = app.add_subcommand("report", "make a report from records");
  command->footer(format_examples(kReportExamples));
  command
      ->add_option("RECORDS", options.paths,
                   "the folder of a lab or of lockstep compare, or records and folders of them")
      ->required()
      ->type_name("");
  command
      ->add_option("--out", options.out,
                   "folder for the report (default: the folder itself, or reports/own)")
      ->type_name("DIR");
  command->add_option("--title", options.title, "of the report")->type_name("TEXT");
  HandIn& hand_in = options.hand_in;
  command->add_option("--author", hand_in.author, "who hands the report in")->type_name("NAME");
  command
      ->add_option("--notes", hand_in.notes,
                   "your own words under the report's questions (default: notes.md of the folder)")
      ->type_name("FILE");
  command->add_flag("--zip", hand_in.zip,
                    "also write hand-in.zip: report, code, notes and records");
  return command;
}

int run_report(const ReportOptions& options, const std::string& command) {
  require_font();
  require_notes(options.hand_in);
  for (const auto& path : options.paths) {
    if (fs::exists(path)) continue;
    throw Error(Code::kFileRead, fmt::format("there is no file or folder {}", path),
                "name a record that a program wrote with --json or LOCKSTEP_RECORD, or a folder of "
                "them");
  }
  if (options.paths.size() == 1 && fs::is_directory(options.paths.front())) {
    const fs::path folder = options.paths.front();
    const fs::path out = options.out.empty() ? folder : fs::path(options.out);
    if (fs::exists(folder / kSavedLab)) return report_lab(folder, out, options);
    if (fs::exists(folder / kSavedComparison)) return report_comparison(folder, out, options);
  }
  return report_records(options, command);
}

}  // namespace lockstep::cli
