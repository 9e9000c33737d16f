#include "cli/lab5.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/facts.hpp"
#include "cli/lab5_answers.hpp"
#include "cli/lab5_tables.hpp"
#include "cli/progress.hpp"
#include "lockstep/file.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kWidth = 100;

// Each table with the name of its CSV file.
std::vector<std::pair<std::string, Table>> all_tables(const Lab5Results& results) {
  return {{"speed", speed_table(results)},
          {"memory", memory_table(results)},
          {"split", split_table(results)},
          {"bottleneck", bottleneck_table(results)}};
}

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

std::vector<std::pair<Experiment, RunRecord>> run_experiments(const Lab5Plan& plan,
                                                              const fs::path& records,
                                                              const Interrupts& interrupts) {
  double weight = 0;
  for (const auto& experiment : plan.experiments) weight += experiment.weight;
  Progress progress(static_cast<int>(plan.experiments.size()), weight);
  std::vector<std::pair<Experiment, RunRecord>> finished;
  for (const auto& experiment : plan.experiments) {
    const std::string record = (records / (experiment.name + ".json")).string();
    ChildCommand command{.program = sibling_path(experiment.program),
                         .arguments = experiment.arguments,
                         .cores = experiment.cores};
    command.arguments.insert(command.arguments.end(), {"--json", record});
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

std::string now_utc() {
  return fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(std::time(nullptr)));
}

}  // namespace

std::string lab5_report(const Lab5Results& results, const std::string& command,
                        const std::string& date, const std::vector<std::string>& record_names) {
  const RunRecord& run = results.single.runs.front();
  std::string text = "# Practical 5: one device, then DataParallel\n\n";
  text += fmt::format("- date: {}\n- command: `{}`\n", date, command);
  for (const auto& [name, value] : run.host)
    text += fmt::format("- host {}: {}\n", name, escape_markdown(value));
  for (const auto& [name, value] : run.versions) {
    text += fmt::format("- {} version: {}\n", name, escape_markdown(value));
  }
  text += "\n## Measurements\n\n";
  for (const auto& [name, table] : all_tables(results)) text += table.markdown() + "\n";
  std::string topic;
  for (const auto& answer : answer_lab5(results)) {
    if (answer.topic != topic) text += fmt::format("## Questions: {}\n\n", answer.topic);
    topic = answer.topic;
    text += fmt::format("**{}** {}\n\n", answer.question, escape_markdown(answer.text));
  }
  text += "## Records\n\nEverything above is made from these files, one per run.\n\n";
  for (const auto& name : record_names) text += fmt::format("- [{0}](records/{0}.json)\n", name);
  return text;
}

int run_lab5(const Lab5Options& options, const std::string& command) {
  const Interrupts interrupts;
  const Lab5Plan plan = plan_lab5(options, detect_hardware(interrupts));
  const fs::path out = options.out;
  make_folder(out / "records");
  const double others_busy_cores = busy_cores();
  Lab5Results results = collect(run_experiments(plan, out / "records", interrupts));
  results.others_busy_cores = others_busy_cores;

  const bool style = may_style(STDOUT_FILENO);
  for (const auto& [name, table] : all_tables(results)) {
    fmt::print("\n{}", table.terminal(style));
    write_file_atomically((out / (name + ".csv")).string(), table.csv());
  }
  print_answers(answer_lab5(results), style);

  std::vector<std::string> record_names;
  for (const auto& experiment : plan.experiments) record_names.push_back(experiment.name);
  const std::string report = (out / "report.md").string();
  write_file_atomically(report, lab5_report(results, command, now_utc(), record_names));
  fmt::print("\nReport: {} (tables as CSV and the records are beside it)\n", report);
  return 0;
}

}  // namespace lockstep::cli
