#include "launch/cluster.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void add_default(Settings& settings, const char* name, std::string text, const char* source) {
  settings.try_emplace(name, Setting{std::move(text), source});
}

// An allocation's tasks are what its owner means by ranks.
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

// "n1", "each of 4 hosts".
std::string name_hosts(const SlurmJob& job) {
  return job.nnodes() == 1 ? job.hosts.front() : fmt::format("each of {} hosts", job.nnodes());
}

}  // namespace

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
  if (!job.in_step && !settings.contains("nnodes")) {
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
