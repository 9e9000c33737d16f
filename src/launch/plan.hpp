#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/console_plan.hpp"
#include "launch/flags.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep {

/// One value of the plan, for --dry-run.
struct PlanFact {
  std::string name;    ///< "ranks on this host"
  std::string value;   ///< "4"
  std::string source;  ///< "--nproc-per-node", "default"
};

/// Everything `lockstep run` is going to do on this host. What --dry-run prints is what runs.
struct LaunchPlan {
  std::string run_name;              ///< names board and logs: "train-3f9a1c"
  std::vector<std::string> command;  ///< [0] is a program's name or path
  std::string script;                ///< the Python file in it; "" where there is none

  int local_world_size = 1;
  std::vector<int> host_cores;  ///< of all ranks here
  std::vector<SlotPlan> slots;  ///< [local rank] cores and threads
  bool pin = true;
  int threads = 1;      ///< OMP_NUM_THREADS
  std::string backend;  ///< "" is automatic
  std::string role = "default";

  int nnodes = 1;
  int node_rank = -1;         ///< -1: by order of arrival
  std::string endpoint_host;  ///< where several hosts meet
  int endpoint_port = 0;
  std::string job_id = "none";
  double join_timeout_s = 300;
  double host_timeout_s = 10;             ///< of silence, after which another host is lost
  std::string master_addr = "127.0.0.1";  ///< one host only; several agree on theirs
  int master_port = 0;                    ///< 0: any free one

  std::optional<double> timeout_s;
  double grace_s = 5;
  int max_restarts = 0;
  std::vector<int> signals;  ///< that the launcher handles; see SignalWatch

  ConsolePlan console;
  std::string log_folder;  ///< of this run; one folder a round inside
  bool keep_logs = false;  ///< also after success
  bool quiet = false;
  bool dry_run = false;

  std::vector<std::string> notes;  ///< flags that have no effect, and why
  std::vector<PlanFact> facts;
};

/// What the plan depends on besides flags.
struct LaunchFacts {
  std::vector<int> cores;           ///< that this process may use
  std::function<int()> count_gpus;  ///< asked only where a flag needs it
  std::string random;               ///< six letters or digits that no other run has
  std::string temporary_folder;     ///< "/tmp"
  unsigned user = 0;                ///< user id
  VariableLookup lookup;            ///< OMP_NUM_THREADS, PYTHON_EXEC
};

/// Flags and facts to a plan; a value that makes no sense is an Error (kUsage) that names it and
/// its remedy. Touches nothing.
LaunchPlan make_plan(const Settings& settings, const std::vector<std::string>& program,
                     const LaunchFacts& facts);

/// The plan as a table, for --dry-run.
std::string describe_plan(const LaunchPlan& plan);

/// One line: version, ranks, hosts, threads and cores, logs.
std::string start_line(const LaunchPlan& plan);

}  // namespace lockstep
