#include "cli/lab/lab_runner.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/process.hpp"
#include "cli/child.hpp"
#include "cli/doctor/facts.hpp"
#include "cli/lab/folder_lock.hpp"
#include "cli/lab/saved_lab.hpp"
#include "cli/terminal.hpp"
#include "lockstep/units.hpp"
#include "report/text.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

// Shows on standard error how far the experiments have come: a bar with the time left on a
// terminal, otherwise one line per experiment.
class Progress {
 public:
  Progress(size_t experiments, double total_weight)
      : experiments_(experiments), total_weight_(total_weight) {}
  ~Progress() {
    if (bar_) print_error("\r\033[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(const Experiment& experiment) {
    title_ = experiment.title;
    weight_ = experiment.weight;
    begun_ = Clock::now();
    tick();
  }

  void tick() {  // redraws the bar, on one line whatever the window's width
    if (!bar_) return;
    print_error("\r\033[K" + progress_line({.done = done_,
                                            .all = experiments_,
                                            .share = done_weight_ / total_weight_,
                                            .title = title_,
                                            .seconds_left = seconds_left()},
                                           terminal_width(STDERR_FILENO) - 1, utf8_));
  }

  void end() {  // the experiment that began last is done
    const double seconds = running_s();
    ++done_;
    done_weight_ += weight_;
    spent_s_ += seconds;
    if (!bar_) {
      print_error(
          fmt::format("[{}/{}] {}: {}\n", done_, experiments_, title_, format_seconds(seconds)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  double running_s() const { return std::chrono::duration<double>(Clock::now() - begun_).count(); }
  double seconds_left() const {
    if (done_weight_ <= 0) return 0;
    return std::max(0.0, spent_s_ / done_weight_ * (total_weight_ - done_weight_) - running_s());
  }

  const bool bar_ = can_redraw(STDERR_FILENO);
  const bool utf8_ = locale_is_utf8();
  const size_t experiments_;
  const double total_weight_;
  Clock::time_point begun_;
  size_t done_ = 0;
  double done_weight_ = 0;
  double weight_ = 0;   // of the experiment that runs
  double spent_s_ = 0;  // in experiments that are done
  std::string title_;
};

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

LabRuns run_experiments(const LabPlan& plan, const SavedLab& saved, const fs::path& records,
                        const Interrupts& interrupts) {
  double weight = 0;
  for (const auto& experiment : plan.experiments) weight += experiment.weight;
  LabRuns runs{.sets = {}, .others_busy_cores = saved.others_busy_cores, .options = saved.options};
  Progress progress(plan.experiments.size(), weight);
  for (const auto& experiment : plan.experiments) {
    const std::string record = (records / (experiment.name + ".json")).string();
    ChildCommand command = command_for(experiment, record);
    command.tick = [&progress] { progress.tick(); };
    progress.begin(experiment);
    run_child_or_throw(command, interrupts);
    runs.add(experiment, read_record(record));
    progress.end();
  }
  return runs;
}

}  // namespace

int run_lab(const Lab& lab, const LabOptions& options, const HandIn& hand_in,
            const std::string& command) {
  require_font();  // not after minutes of measuring
  require_notes(hand_in);
  const Interrupts interrupts;
  const LabPlan plan = lab.plan(options, detect_hardware(interrupts));
  require_programs(plan);
  const fs::path out = options.out.empty() ? lab.folder : options.out;
  make_folder(out / "records");
  const FolderLock lock(out.string());
  const SavedLab saved{lab.name, command,          std::time(nullptr), busy_cores(),
                       options,  plan.experiments, hand_in.author};
  save_lab(saved, out);  // first, so that the report can be made even if the disk is full then
  const LabReport report = lab.report(run_experiments(plan, saved, out / "records", interrupts));
  ReportOrigin origin{command, saved.date, {}};
  for (const auto& experiment : plan.experiments) origin.records.push_back(experiment.name);
  publish_report(report, origin, hand_in, out);
  return 0;
}

}  // namespace lockstep::cli
