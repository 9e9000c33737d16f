#include "cli/slurm_script.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "launch/number_list.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  lockstep slurm-script --nodes 2 -n 8 --gpus 8 ./train --steps 1000 > job.sh\n"
    "  sbatch job.sh\n";

CLI::Validator range(int64_t first, int64_t last) {
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

CLI::App* add_slurm_script_command(CLI::App& app, SlurmScriptOptions& options) {
  CLI::App* command = app.add_subcommand("slurm-script", "print a batch file for SLURM");
  command->footer(kExamples);
  command->add_option("--nodes", options.nodes, "hosts")
      ->capture_default_str()
      ->check(range(1, 4096))
      ->type_name("N");
  command->add_option("-n,--nproc-per-node", options.ranks, "ranks per host; auto: one per GPU")
      ->capture_default_str()
      ->type_name("N|auto");
  command->add_option("--gpus", options.gpus, "GPUs per host")
      ->check(range(1, 1024))
      ->type_name("N");
  command->add_option("--cpus", options.cpus, "cores per host (default: all of them)")
      ->check(range(1, 4096))
      ->type_name("N");
  command->add_option("--time", options.time, "longest run")
      ->capture_default_str()
      ->type_name("H:M:S");
  command->add_option("--partition", options.partition, "SLURM's partition")->type_name("NAME");
  command->add_option("--account", options.account, "who pays")->type_name("NAME");
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
  text += fmt::format(
      "\n"
      "set -eu\n"
      "# The hosts of this job know each other by a secret of its own.\n"
      "LOCKSTEP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\n"
      "export LOCKSTEP_TOKEN\n"
      "# SIGTERM at the time limit reaches the ranks; --grace is how long they may take.\n"
      "exec srun --ntasks-per-node=1 lockstep run --nproc-per-node={} \\\n"
      "  --log-dir=\"logs-$SLURM_JOB_ID\" --grace=30 {}\n",
      options.ranks, line);
  return text;
}

}  // namespace lockstep::cli
