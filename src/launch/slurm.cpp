#include "launch/slurm.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/lists.hpp"
#include "base/slurm_lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// The rendezvous of a step's ranks is at slurm_port(..., 0): see rank_environment.cpp.
constexpr int kLaunchersOffset = 1;

// The step of the shell that salloc starts on the first node if LaunchParameters contains
// use_interactive_step. It is one task, but stands for the whole allocation.
constexpr std::string_view kInteractiveStep = "4294967290";

class SlurmVariables {
 public:
  explicit SlurmVariables(const RankEnvironment::Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }

  std::optional<int> number(const char* name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto result = parse_whole_number(*value);
    if (!result || *result < 0) {
      throw Error(Code::kWorld, fmt::format("{}=\"{}\" is not a number", name, *value),
                  "SLURM sets it: unset it if this is not a SLURM job");
    }
    return result;
  }

 private:
  const RankEnvironment::Lookup& lookup_;
};

[[noreturn]] void throw_contradiction(const std::string& what) {
  throw Error(Code::kWorld, "SLURM's variables contradict each other: " + what,
              "start `lockstep run` with srun, or unset the SLURM_ variables of an older job");
}

// SLURM_STEP_* inside a step, SLURM_JOB_* and older names in an allocation.
void read_hosts(const SlurmVariables& variables, SlurmJob& job) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (!job.in_step && std::string_view(name) == "SLURM_STEP_NODELIST") continue;
    if (const auto list = variables.text(name)) {
      job.hosts = expand_slurm_hosts(name, *list);
      return;
    }
  }
}

void read_tasks(const SlurmVariables& variables, SlurmJob& job) {
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (!job.in_step && std::string_view(name) == "SLURM_STEP_TASKS_PER_NODE") continue;
    const auto list = variables.text(name);
    if (!list) continue;
    job.tasks_per_node = expand_slurm_counts(name, *list);
    if (job.tasks_per_node.size() != job.hosts.size()) {
      throw_contradiction(fmt::format("{}={} is for {} nodes, but the node list has {}", name,
                                      *list, job.tasks_per_node.size(), job.hosts.size()));
    }
    return;
  }
}

std::string_view short_name(std::string_view host) {
  return host.substr(0, host.find('.'));
}

// salloc runs its command where it was typed, often on a login node, with the variables of the
// nodes. Processes that slurmd starts get the node's name from it; others must compare host names.
std::string find_here(const SlurmVariables& variables, const SlurmJob& job,
                      const std::string& host_name) {
  const auto node_name = variables.text("SLURMD_NODENAME");
  for (const std::string& host : job.hosts) {
    if (node_name && host == *node_name) return host;
  }
  for (const std::string& host : job.hosts) {
    if (host == host_name || short_name(host) == short_name(host_name)) return host;
  }
  return "";
}

void add_default(Settings& settings, const char* name, std::string text, const char* source) {
  settings.try_emplace(name, Setting{std::move(text), source});
}

// The tasks of an allocation are meant to be ranks.
void take_ranks_from_tasks(const SlurmJob& job, Settings& settings) {
  if (job.in_step || job.tasks_per_node.empty()) return;
  const auto [least, most] =
      std::minmax_element(job.tasks_per_node.begin(), job.tasks_per_node.end());
  if (*least == *most && *most > 1) {
    add_default(settings, "nproc-per-node", std::to_string(*most), "SLURM_TASKS_PER_NODE");
  }
}

void refuse_several_launchers(const SlurmJob& job) {
  const auto crowded = std::find_if(job.tasks_per_node.begin(), job.tasks_per_node.end(),
                                    [](int tasks) { return tasks > 1; });
  if (!job.in_step || crowded == job.tasks_per_node.end()) return;
  throw Error(
      Code::kLaunch,
      fmt::format("srun started {} launchers on one host, and each would start ranks", *crowded),
      "use srun --ntasks-per-node=1 lockstep run -n RANKS ./program, or srun ./program "
      "without lockstep run");
}

// True if the user starts a launcher on each host. A range of hosts without an endpoint only says
// how many of the allocation's must be there.
bool names_its_hosts(const Settings& settings) {
  const auto nnodes = settings.find("nnodes");
  if (nnodes == settings.end()) return false;
  const auto count = parse_host_count(nnodes->second.text);
  return !count || !count->elastic() || settings.contains("rdzv-endpoint") ||
         settings.contains("master-addr");
}

// "n1", "each of 4 hosts".
std::string name_hosts(const SlurmJob& job) {
  return job.nnodes() == 1 ? job.hosts.front() : fmt::format("each of {} hosts", job.nnodes());
}

}  // namespace

std::optional<SlurmJob> read_slurm(const RankEnvironment::Lookup& lookup,
                                   const std::string& host_name) {
  const SlurmVariables variables(lookup);
  const auto job_id = variables.text("SLURM_JOB_ID");
  if (!job_id) return std::nullopt;
  SlurmJob job;
  const auto tasks = variables.number("SLURM_STEP_NUM_TASKS");
  const auto task = variables.number("SLURM_PROCID");
  job.in_step = tasks && task && variables.text("SLURM_STEP_ID") != kInteractiveStep;
  const std::string step = job.in_step ? variables.text("SLURM_STEP_ID").value_or("0") : "batch";
  job.job_id = fmt::format("slurm-{}.{}", *job_id, step);
  job.port = slurm_port(*job_id, step, kLaunchersOffset);
  read_hosts(variables, job);
  if (job.hosts.empty()) return std::nullopt;  // a shell that only inherited the job id
  read_tasks(variables, job);
  job.cpus_per_task = variables.number("SLURM_CPUS_PER_TASK");
  job.gpus = variables.number("SLURM_GPUS_ON_NODE").value_or(0);
  job.here = find_here(variables, job, host_name);
  if (!job.in_step) return job;
  job.task = *task;
  job.node_rank = variables.number("SLURM_NODEID").value_or(0);
  if (job.node_rank >= job.nnodes()) {
    throw_contradiction(
        fmt::format("SLURM_NODEID={} in a step of {} nodes", job.node_rank, job.nnodes()));
  }
  if (*task >= *tasks) {
    throw_contradiction(fmt::format("SLURM_PROCID={} in a step of {} tasks", *task, *tasks));
  }
  job.here = job.hosts[static_cast<size_t>(job.node_rank)];
  return job;
}

ClusterStart apply_slurm(const SlurmJob& job, Settings& settings) {
  refuse_several_launchers(job);
  take_ranks_from_tasks(job, settings);
  add_default(settings, "nproc-per-node", "auto", "SLURM");
  ClusterStart start;
  if (settings.contains("standalone") && job.here.empty()) {
    start.announcement = fmt::format("SLURM job {} has {}, but {} runs the ranks on this host",
                                     job.job_id, name_hosts(job), settings.at("standalone").source);
    return start;
  }
  const bool one_host = job.nnodes() == 1 || settings.contains("standalone");
  if (one_host && !job.here.empty()) {
    start.announcement = fmt::format("SLURM job {} on {}", job.job_id, job.here);
    return start;
  }
  if (!job.in_step && !names_its_hosts(settings)) {
    start.announcement =
        fmt::format("SLURM job {}: srun starts a launcher on {}{}", job.job_id, name_hosts(job),
                    job.here.empty() ? ", since this host is not part of the job" : "");
    start.srun = {"srun", fmt::format("--nodes={}", job.nnodes()),
                  fmt::format("--ntasks={}", job.nnodes()), "--ntasks-per-node=1",
                  "--kill-on-bad-exit=0"};
    return start;
  }
  if (!job.in_step) return start;
  add_default(settings, "nnodes", std::to_string(job.nnodes()), "SLURM_STEP_NUM_NODES");
  add_default(settings, "node-rank", std::to_string(job.node_rank), "SLURM_NODEID");
  if (!settings.contains("master-addr")) {
    add_default(settings, "rdzv-endpoint", fmt::format("{}:{}", job.endpoint_host(), job.port),
                "SLURM_STEP_NODELIST");
  }
  add_default(settings, "rdzv-id", job.job_id, "SLURM_JOB_ID");
  start.announcement = fmt::format("SLURM job {}: host {} of {} ({})", job.job_id, job.node_rank,
                                   job.nnodes(), job.hosts[static_cast<size_t>(job.node_rank)]);
  return start;
}

}  // namespace lockstep
