#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fault.hpp"
#include "launch/flags.hpp"
#include "lockstep/device_plan.hpp"

namespace lockstep {

enum class Stream { kOut, kErr };

/// What the console does with a line; log files keep every line.
enum class Shown {
  kHidden,
  kHeld,  ///< shown after a short delay, unless the run fails first: then only the culprit counts
  kLive
};

/// Which ranks' output the console shows.
struct ConsolePlan {
  std::optional<std::vector<int>> ranks = std::vector<int>{0};  ///< --ranks; nullopt: all
  std::optional<std::vector<int>> local_ranks;  ///< --local-ranks-filter: only these
  std::vector<int> redirects;                   ///< [local rank] bit 0: output, bit 1: errors
  std::vector<int> tee;                         ///< [local rank] as redirects, which it overrides
};

Shown decide_shown(const ConsolePlan& plan, int rank, int local_rank, Stream stream);

/// One value of the plan, for --dry-run.
struct PlanFact {
  std::string name;    ///< "ranks on this host"
  std::string value;   ///< "4"
  std::string source;  ///< "--nproc-per-node", "default"
};

/// Everything that `lockstep run` is going to do on this host. --dry-run prints this very object.
struct LaunchPlan {
  std::string run_name;              ///< names board and logs: "train-3f9a1c"
  std::vector<std::string> command;  ///< [0] is the name or path of a program
  std::string script;                ///< the Python file in it; "" if there is none

  int local_world_size = 1;
  std::vector<int> host_cores;  ///< of all ranks on this host
  std::vector<SlotPlan> slots;  ///< [local rank] cores and threads
  bool pin = true;
  int threads = 1;      ///< OMP_NUM_THREADS
  std::string backend;  ///< "" means auto
  std::string role = "default";

  HostCount nnodes;
  int node_rank = -1;         ///< -1: by order of arrival
  std::string endpoint_host;  ///< of the rendezvous of several hosts
  int endpoint_port = 0;
  std::string job_id = "none";
  double join_timeout_s = 300;  ///< longest wait for enough hosts
  double last_call_s = 30;      ///< wait for each further host once nnodes.least have come
  double heartbeat_s = 1;
  double host_timeout_s = 10;             ///< a host that is silent for so long is lost
  std::string master_addr = "127.0.0.1";  ///< one host only; several agree on one
  int master_port = 0;                    ///< 0: any free port

  std::optional<double> timeout_s;
  std::optional<double> step_timeout_s;  ///< without a step or collective of any rank
  double grace_s = 5;                    ///< from SIGTERM to SIGKILL, after a failure or Ctrl-C
  double grace_to_save_s = 25;           ///< the same, when this job was asked to stop by SIGTERM
  int max_restarts = 0;
  std::vector<int> signals;   ///< handled by the launcher; see SignalWatch
  std::vector<Fault> faults;  ///< provoked in the first attempt

  ConsolePlan console;
  std::string log_folder;  ///< of this run, with one subfolder per attempt
  bool keep_logs = false;  ///< even after success
  bool quiet = false;
  bool dry_run = false;

  std::vector<std::string> notes;  ///< flags that have no effect, and why
  std::vector<PlanFact> facts;
};

/// What the plan depends on in addition to the flags.
struct LaunchFacts {
  std::vector<int> cores;           ///< this process may use
  std::function<int()> count_gpus;  ///< called only if a flag needs it
  std::string random;               ///< six characters that no other run has
  std::string temporary_folder;     ///< "/tmp"
  unsigned user = 0;                ///< user id
  VariableLookup lookup;            ///< OMP_NUM_THREADS, PYTHON_EXEC
};

/// Makes the plan from flags and facts, without side effects. An invalid value is an Error (kUsage)
/// that names it and its remedy.
LaunchPlan make_plan(const Settings& settings, const std::vector<std::string>& program,
                     const LaunchFacts& facts);

/// The plan as a table, for --dry-run.
std::string describe_plan(const LaunchPlan& plan);

/// One line: version, ranks, hosts, threads and cores, backend, logs.
std::string start_line(const LaunchPlan& plan);

}  // namespace lockstep
