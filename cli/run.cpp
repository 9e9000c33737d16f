#include "cli/run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/lists.hpp"
#include "base/process.hpp"
#include "base/random.hpp"
#include "cli/child.hpp"
#include "cli/nvml.hpp"
#include "launch/flags.hpp"
#include "launch/launcher.hpp"
#include "launch/plan.hpp"
#include "launch/slurm.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "net/secret.hpp"

namespace lockstep::cli {
namespace {

const CLI::App* find_command(const std::string& name,
                             const std::vector<const CLI::App*>& commands) {
  for (const CLI::App* command : commands) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

// A flag's name and the value that its own word holds: "--tee=3", "-t3".
struct Flag {
  std::string name;  // "--tee", "-t"
  std::string value;
  bool has_value = false;
};

Flag split_flag(const std::string& word) {
  if (!word.starts_with("--")) return {word.substr(0, 2), word.substr(2), word.size() > 2};
  const size_t equals = word.find('=');
  Flag flag{word.substr(0, equals), "", equals != std::string::npos};
  if (flag.has_value) flag.value = word.substr(equals + 1);
  std::replace(flag.name.begin(), flag.name.end(), '_', '-');
  return flag;
}

const std::vector<Example> kRunExamples = {
    {"lockstep run -n 4 ./train --steps 100", "four ranks of ./train on this host"},
    {"lockstep run -n 2 train.py", "a Python program, as torchrun would"},
    {"lockstep run -n 4 --ranks all ./train", "show the output of all ranks"},
    {"lockstep run -n 4 --dry-run ./train", "what would be done, and why"},
    {"lockstep run -n 8 --nnodes 2 --rdzv-endpoint node0:29400 ./train", "on both hosts"}};

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

// SLURM counts the GPUs that its administrator has configured; ranks would silently use the cores.
std::string missing_gpus(const SlurmJob& slurm) {
  if (slurm.gpus == 0 || slurm.here.empty()) return "";
  const int here = count_gpus();
  if (here >= slurm.gpus) return "";
  return fmt::format("; SLURM gives it {} GPU{} here, but {}", slurm.gpus,
                     slurm.gpus == 1 ? "" : "s",
                     here == 0 ? "the NVIDIA driver shows none: `lockstep doctor` tells why"
                               : fmt::format("CUDA_VISIBLE_DEVICES leaves {}", here));
}

// Inside an allocation of several hosts, srun starts the same command on each of them. The ranks
// per host are passed on, since the tasks of a step are its launchers.
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
  // srun hands it to every host, where it must not be the user's own, which serves other jobs, too.
  const char* token = std::getenv("LOCKSTEP_TOKEN");
  if (token == nullptr || *token == '\0') {
    ::setenv("LOCKSTEP_TOKEN", make_token().c_str(), 1);
  }
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

const std::vector<Example> kSlurmExamples = {
    {"lockstep slurm-script --nodes 2 -n 8 --gpus 8 ./train --steps 1000 > job.sh",
     "two hosts with eight ranks each"},
    {"lockstep slurm-script -n 8 --requeue 120 ./train --checkpoint run > job.sh",
     "saves before the time limit, and goes on in the next run of the job"},
    {"sbatch job.sh", "hand it to SLURM"}};

CLI::Validator in_range(int64_t first, int64_t last) {
  return CLI::Range(first, last).description("");
}

void check(const SlurmScriptOptions& options, const std::vector<std::string>& program) {
  if (program.empty()) {
    throw Error(Code::kUsage, "lockstep slurm-script needs a program to start",
                "write it after the flags: lockstep slurm-script --nodes 2 ./train --steps 100");
  }
  const auto ranks = parse_whole_number(options.ranks);
  if (options.ranks != "auto" && (!ranks || *ranks < 1)) {
    throw Error(Code::kUsage,
                fmt::format("--nproc-per-node \"{}\" is neither a number nor auto", options.ranks),
                "write -n 8, or -n auto for one rank per GPU");
  }
  // A line break would start a line of its own in the file.
  for (const auto* text : {&options.time, &options.partition, &options.account}) {
    if (text->find_first_of(" \t\n\"'`$;&|") == std::string::npos) continue;
    throw Error(Code::kUsage, fmt::format("\"{}\" has characters that sbatch does not take", *text),
                "write --time 02:00:00, --partition NAME, --account NAME");
  }
}

}  // namespace

std::vector<const char*> ProgramLine::flag_pointers() const {
  std::vector<const char*> pointers;
  pointers.reserve(flags.size());
  for (const auto& word : flags) pointers.push_back(word.c_str());
  return pointers;
}

ProgramLine cut_at_program(const std::vector<std::string>& words,
                           const std::vector<const CLI::App*>& commands) {
  const CLI::App* command = words.size() < 2 ? nullptr : find_command(words[1], commands);
  if (command == nullptr) return {words, {}};
  ProgramLine line{{words[0], words[1]}, {}};
  size_t at = 2;
  for (; at < words.size(); ++at) {
    const std::string& word = words[at];
    if (word == "--") {
      ++at;
      break;
    }
    if (word.size() < 2 || word[0] != '-') break;
    const Flag flag = split_flag(word);
    const CLI::Option* option = command->get_option_no_throw(flag.name);
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    if (!takes_value) {
      // A switch, or an unknown flag, which the parser names as it was typed.
      line.flags.push_back(option != nullptr && !flag.has_value ? flag.name : word);
      continue;
    }
    const std::string name = "--" + option->get_lnames().front();
    if (flag.has_value) {
      line.flags.push_back(name + "=" + flag.value);
    } else if (at + 1 < words.size()) {
      line.flags.push_back(name + "=" + words[++at]);
    } else {
      line.flags.push_back(name);
    }
  }
  line.program.assign(words.begin() + static_cast<long>(std::min(at, words.size())), words.end());
  return line;
}

RunFlags::RunFlags(CLI::App& app)
    : command_(app.add_subcommand("run", "start a program as several ranks; none is left behind")) {
  command_->footer(format_examples(kRunExamples));
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
    announcement = start.announcement + missing_gpus(*slurm);
    if (!start.srun.empty()) return start_by_srun(std::move(start), settings, words);
  }
  const LaunchPlan plan = make_plan(settings, program, gather_facts());
  const std::string path = find_program(plan, lookup, program_folders());
  if (plan.dry_run) {
    fmt::print("{}", describe_plan(plan));
    return 0;
  }
  if (!announcement.empty() && !plan.quiet)
    print_error(fmt::format("lockstep: {}\n", announcement));
  // Ranks write to a pipe, and the launcher puts "[rank 0] " before each line of theirs.
  constexpr size_t kPrefix = 9;
  const size_t width = terminal_width(STDOUT_FILENO);
  if (width != kAnyWidth && width > kPrefix) {
    ::setenv("LOCKSTEP_COLUMNS", std::to_string(width - kPrefix).c_str(), 1);
  }
  return launch(plan, path);
}

CLI::App* add_slurm_script_command(CLI::App& app, SlurmScriptOptions& options) {
  CLI::App* command = app.add_subcommand("slurm-script", "print a batch file for SLURM");
  command->footer(format_examples(kSlurmExamples));
  command->add_option("--nodes", options.nodes, "hosts")
      ->capture_default_str()
      ->check(in_range(1, kMostHosts))
      ->type_name("N");
  command->add_option("-n,--nproc-per-node", options.ranks, "ranks per host; auto: one per GPU")
      ->capture_default_str()
      ->type_name("N|auto");
  command->add_option("--gpus", options.gpus, "GPUs per host")
      ->check(in_range(1, 1024))
      ->type_name("N");
  command->add_option("--cpus", options.cpus, "cores per host (default: all of them)")
      ->check(in_range(1, 4096))
      ->type_name("N");
  command->add_option("--time", options.time, "longest run")
      ->capture_default_str()
      ->type_name("H:M:S");
  command
      ->add_option("--requeue", options.requeue,
                   "how long before the time limit ranks save a checkpoint and the job is requeued")
      ->check(in_range(1, 86'400))
      ->type_name("SECONDS");
  command->add_option("--partition", options.partition, "SLURM's partition")->type_name("NAME");
  command->add_option("--account", options.account, "account to charge")->type_name("NAME");
  command->add_option("PROGRAM")
      ->description("what to start, with its own flags after it")
      ->type_name("")
      ->expected(0, 1);
  return command;
}

std::string slurm_script(const SlurmScriptOptions& options,
                         const std::vector<std::string>& program) {
  check(options, program);
  std::vector<const char*> words;
  words.reserve(program.size());
  for (const auto& word : program) words.push_back(word.c_str());
  const std::string line = shell_line(static_cast<int>(words.size()), words.data());
  const std::string name = std::filesystem::path(program[0]).stem().string();
  const std::vector<const char*> job_name = {name.c_str()};
  std::string text = "#!/bin/bash\n";
  const auto add = [&text](const std::string& option) { text += "#SBATCH " + option + "\n"; };
  add(fmt::format("--job-name={}", shell_line(1, job_name.data())));
  add(fmt::format("--nodes={}", options.nodes));
  add("--ntasks-per-node=1  # one launcher per host; it starts the ranks");
  add(options.cpus ? fmt::format("--cpus-per-task={}", *options.cpus) : "--exclusive");
  if (options.gpus) add(fmt::format("--gpus-per-node={}", *options.gpus));
  add(fmt::format("--time={}", options.time));
  if (!options.partition.empty()) add(fmt::format("--partition={}", options.partition));
  if (!options.account.empty()) add(fmt::format("--account={}", options.account));
  add("--output=%x-%j.log");
  if (options.requeue) {
    add("--requeue");
    add("--open-mode=append");
    add(fmt::format("--signal=USR1@{}  # to the launchers, which pass it on to the ranks",
                    *options.requeue));
  }
  text +=
      "\n"
      "set -eu\n"
      "# The hosts of this job know each other by a secret of its own.\n"
      "LOCKSTEP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\n"
      "export LOCKSTEP_TOKEN\n"
      "# SIGTERM at the time limit reaches the ranks, which have 25 s to save (--grace).\n";
  const std::string run = fmt::format(
      "srun --ntasks-per-node=1{} lockstep run --nproc-per-node={} \\\n"
      "  --log-dir=\"logs-$SLURM_JOB_ID\" {}",
      options.cpus ? fmt::format(" --cpus-per-task={}", *options.cpus) : "", options.ranks, line);
  if (!options.requeue) return text + "exec " + run + "\n";
  text += "status=0\n" + run +
          " || status=$?\n"
          "# 75: the ranks have saved and stopped; the next run of this job goes on from there.\n"
          "if [ \"$status\" -eq 75 ]; then scontrol requeue \"$SLURM_JOB_ID\"; fi\n"
          "exit \"$status\"\n";
  return text;
}

}  // namespace lockstep::cli
