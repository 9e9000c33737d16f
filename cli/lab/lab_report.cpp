#include "cli/lab/lab_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/child.hpp"
#include "cli/doctor/facts.hpp"
#include "cli/lab/lab_document.hpp"
#include "cli/progress.hpp"
#include "lockstep/file.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kWidth = 100;

Hardware detect_hardware(const Interrupts& interrupts) {
  const auto probe = probe_facts(false, interrupts);
  if (probe.contains("error")) {
    throw Error(Code::kEngine, "libtorch cannot be used", "`lockstep doctor` says more",
                {probe["error"].get<std::string>()});
  }
  return Hardware::detect(probe.value("gpus_usable", 0));
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder)) {
    throw Error(Code::kFileWrite,
                fmt::format("cannot make the folder {}: {}", folder.string(),
                            error ? error.message() : "a file of that name exists"),
                "name a folder you may write to with --out");
  }
}

// Names a missing program before anything is written or measured.
void require_programs(const LabPlan& plan) {
  for (const auto& experiment : plan.experiments) sibling_path(experiment.program);
}

ChildCommand command_for(const Experiment& experiment, const std::string& record) {
  ChildCommand command{.program = sibling_path(experiment.program), .arguments = {}};
  if (experiment.ranks > 0) {
    command.arguments = {"run", "--nproc-per-node", std::to_string(experiment.ranks), "--quiet",
                         command.program};
    command.program = sibling_path("lockstep");
  }
  command.arguments.insert(command.arguments.end(), experiment.arguments.begin(),
                           experiment.arguments.end());
  command.arguments.insert(command.arguments.end(), {"--json", record});
  command.cores = experiment.cores;
  return command;
}

Finished run_experiments(const LabPlan& plan, const fs::path& records,
                         const Interrupts& interrupts) {
  double weight = 0;
  for (const auto& experiment : plan.experiments) weight += experiment.weight;
  Progress progress(static_cast<int>(plan.experiments.size()), weight);
  Finished finished;
  for (const auto& experiment : plan.experiments) {
    const std::string record = (records / (experiment.name + ".json")).string();
    ChildCommand command = command_for(experiment, record);
    command.tick = [&progress] { progress.tick(); };
    progress.begin(experiment.title, experiment.weight);
    run_child_or_throw(command, interrupts);
    finished.emplace_back(experiment, read_record(record));
    progress.end();
  }
  return finished;
}

void print_answers(const std::vector<Answer>& answers, bool style) {
  std::string topic;
  for (const auto& answer : answers) {
    if (answer.topic != topic) fmt::print("\nQuestions: {}\n", answer.topic);
    topic = answer.topic;
    fmt::print("\n{}{}{}\n{}\n", style ? "\033[1m" : "", answer.question, style ? "\033[0m" : "",
               wrap_text(answer.text, kWidth, "  "));
  }
}

}  // namespace

int run_lab(const Lab& lab, const LabOptions& options, const std::string& command) {
  require_font();  // not after minutes of measuring
  const Interrupts interrupts;
  const LabPlan plan = lab.plan(options, detect_hardware(interrupts));
  require_programs(plan);
  const fs::path out = options.out.empty() ? lab.folder : options.out;
  make_folder(out / "records");
  const double others_busy_cores = busy_cores();
  const LabReport report =
      lab.report(run_experiments(plan, out / "records", interrupts), others_busy_cores);

  const bool style = may_style(STDOUT_FILENO);
  for (const auto& [name, table] : report.tables) {
    fmt::print("\n{}", table.terminal(style));
    write_file_atomically((out / (name + ".csv")).string(), table.csv());
  }
  for (const auto& drawing : report.drawings) fmt::print("\n{}", drawing);
  print_answers(report.answers, style);

  std::vector<std::string> record_names;
  for (const auto& experiment : plan.experiments) record_names.push_back(experiment.name);
  write_report(lab_document(report, command, std::time(nullptr), record_names), out.string());
  fmt::print("\nReport: {}, report.pdf, report.md; tables as CSV and records beside\n",
             (out / "report.html").string());
  return 0;
}

}  // namespace lockstep::cli
