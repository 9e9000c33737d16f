#include "cli/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/standard_streams.hpp"
#include "cli/nvml.hpp"
#include "launch/cluster.hpp"
#include "launch/flags.hpp"
#include "launch/launcher.hpp"
#include "launch/plan.hpp"
#include "launch/program.hpp"
#include "launch/slurm.hpp"
#include "launch/token.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep run -n 4 ./train --steps 100         four ranks of ./train on this host\n"
    "  lockstep run -n 2 train.py                    a Python program, as torchrun would\n"
    "  lockstep run -n 4 --ranks all ./train         show the output of all ranks\n"
    "  lockstep run -n 4 --dry-run ./train           what would be done, and why\n"
    "  lockstep run -n 8 --nnodes 2 --rdzv-endpoint node0:29400 ./train    on both hosts\n";

const char* lookup(const char* name) {
  return std::getenv(name);
}

// The driver's GPUs, less those that CUDA_VISIBLE_DEVICES hides.
int count_gpus() {
  const auto driver = driver_facts();
  const int here = driver.is_null() ? 0 : static_cast<int>(driver.at("gpus").size());
  const char* visible = lookup("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return here;
  const std::string_view text(visible);
  if (text.empty() || text.starts_with("-")) return 0;
  return std::min(here, static_cast<int>(std::count(text.begin(), text.end(), ',')) + 1);
}

LaunchFacts gather_facts() {
  const char* temporary = lookup("TMPDIR");
  return {.cores = Hardware::detect(0).cores,
          .count_gpus = count_gpus,
          .random = random_hex(6),
          .temporary_folder = temporary == nullptr || *temporary == '\0' ? "/tmp" : temporary,
          .user = ::geteuid(),
          .lookup = lookup};
}

// Inside an allocation that is not this host alone: the same command on each host, by srun. The
// ranks per host are passed on, since a step's tasks are its launchers.
int start_by_srun(ClusterStart start, const Settings& settings,
                  const std::vector<std::string>& words) {
  std::vector<std::string>& srun = start.srun;
  srun.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
  srun.push_back(words[1]);
  srun.push_back("--nproc-per-node=" + settings.at("nproc-per-node").text);
  srun.insert(srun.end(), words.begin() + 2, words.end());
  if (settings.contains("dry-run")) {
    fmt::print("{}\n", fmt::join(srun, " "));
    return 0;
  }
  if (!settings.contains("quiet")) print_error(fmt::format("lockstep: {}\n", start.announcement));
  ::setenv("LOCKSTEP_TOKEN", load_or_make_token().c_str(), 1);  // srun hands it to every host
  std::vector<char*> argv;
  for (auto& word : srun) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  throw Error(
      Code::kLaunch,
      fmt::format("{}, but srun cannot be started: {}", start.announcement, std::strerror(errno)),
      "load SLURM's commands, or use --standalone for this host alone; in a shell that "
      "only inherited SLURM's variables, unset SLURM_JOB_ID");
}

}  // namespace

RunFlags::RunFlags(CLI::App& app)
    : command_(app.add_subcommand("run", "start a program as several ranks; none is left behind")) {
  command_->footer(kExamples);
  for (const FlagInfo& flag : run_flags()) {
    const std::string name(flag.name);
    std::string names = flag.letter.empty() ? "" : fmt::format("-{},", flag.letter);
    names += "--" + name;
    CLI::Option* option =
        flag.is_switch() ? command_->add_flag(names) : command_->add_option(names, texts_[name]);
    option->description(std::string(flag.help))->group(std::string(flag.group));
    if (!flag.is_switch()) option->type_name(std::string(flag.value))->take_last();
  }
  // For the usage line only: the program is cut off before parsing.
  command_->add_option("PROGRAM")
      ->description("what to start, with its own flags after it")
      ->type_name("")
      ->expected(0, 1);
}

std::map<std::string, std::string> RunFlags::given() const {
  std::map<std::string, std::string> given;
  for (const FlagInfo& flag : run_flags()) {
    const std::string name(flag.name);
    if (command_->get_option("--" + name)->count() == 0) continue;
    given[name] = flag.is_switch() ? "" : texts_.at(name);
  }
  return given;
}

int run_launch(const RunFlags& flags, const std::vector<std::string>& program,
               const std::vector<std::string>& words) {
  Settings settings = collect_settings(flags.given(), lookup);
  std::string announcement;
  if (const auto slurm = read_slurm(lookup, host_name())) {
    ClusterStart start = apply_slurm(*slurm, settings);
    announcement = start.announcement;
    if (!start.srun.empty()) return start_by_srun(std::move(start), settings, words);
  }
  const LaunchPlan plan = make_plan(settings, program, gather_facts());
  const std::string path = find_program(plan, lookup);
  if (plan.dry_run) {
    fmt::print("{}", describe_plan(plan));
    return 0;
  }
  if (!announcement.empty() && !plan.quiet)
    print_error(fmt::format("lockstep: {}\n", announcement));
  return launch(plan, path);
}

}  // namespace lockstep::cli
