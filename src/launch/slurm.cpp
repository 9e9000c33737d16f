#include "launch/slurm.hpp"

#include <fmt/format.h>

#include <charconv>

#include "base/slurm_lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Ranks of the same step meet at slurm_port(…, 0): see rank_environment.cpp.
constexpr int kLaunchersOffset = 1;

// The step of the shell that salloc starts on the first node where LaunchParameters has
// use_interactive_step. It is one task, but the whole allocation is meant.
constexpr std::string_view kInteractiveStep = "4294967290";

class Variables {
 public:
  explicit Variables(const RankEnvironment::Lookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
  }

  std::optional<int> number(const char* name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int result = -1;
    const char* last = value->data() + value->size();
    const auto [end, error] = std::from_chars(value->data(), last, result);
    if (error != std::errc() || end != last || result < 0) {
      throw Error(Code::kWorld, fmt::format("{}=\"{}\" is not a number", name, *value),
                  "SLURM sets it: unset it if this is no SLURM job");
    }
    return result;
  }

 private:
  const RankEnvironment::Lookup& lookup_;
};

[[noreturn]] void contradiction(const std::string& what) {
  throw Error(Code::kWorld, "SLURM's variables contradict each other: " + what,
              "start `lockstep run` with srun, or unset the SLURM_ variables of an older job");
}

// SLURM_STEP_* inside a step, SLURM_JOB_* and older names in an allocation.
void read_hosts(const Variables& variables, SlurmJob& job) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    if (!job.in_step && std::string_view(name) == "SLURM_STEP_NODELIST") continue;
    if (const auto list = variables.text(name)) {
      job.hosts = expand_slurm_hosts(name, *list);
      return;
    }
  }
}

void read_tasks(const Variables& variables, SlurmJob& job) {
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (!job.in_step && std::string_view(name) == "SLURM_STEP_TASKS_PER_NODE") continue;
    const auto list = variables.text(name);
    if (!list) continue;
    job.tasks_per_node = expand_slurm_counts(name, *list);
    if (job.tasks_per_node.size() != job.hosts.size()) {
      contradiction(fmt::format("{}={} is for {} nodes, but the node list has {}", name, *list,
                                job.tasks_per_node.size(), job.hosts.size()));
    }
    return;
  }
}

std::string_view short_name(std::string_view host) {
  return host.substr(0, host.find('.'));
}

// salloc runs its command where it was typed, often on a login node, with the variables of the
// nodes. slurmd tells what it starts on which node that runs; elsewhere the host's name must do.
std::string find_here(const Variables& variables, const SlurmJob& job,
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

}  // namespace

std::optional<SlurmJob> read_slurm(const RankEnvironment::Lookup& lookup,
                                   const std::string& host_name) {
  const Variables variables(lookup);
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
  if (job.hosts.empty()) return std::nullopt;  // a shell that only inherited the job's number
  read_tasks(variables, job);
  job.cpus_per_task = variables.number("SLURM_CPUS_PER_TASK");
  job.here = find_here(variables, job, host_name);
  if (!job.in_step) return job;
  job.task = *task;
  job.node_rank = variables.number("SLURM_NODEID").value_or(0);
  if (job.node_rank >= job.nnodes()) {
    contradiction(
        fmt::format("SLURM_NODEID={} in a step of {} nodes", job.node_rank, job.nnodes()));
  }
  if (*task >= *tasks) {
    contradiction(fmt::format("SLURM_PROCID={} in a step of {} tasks", *task, *tasks));
  }
  job.here = job.hosts[static_cast<size_t>(job.node_rank)];
  return job;
}

}  // namespace lockstep
