#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/flags.hpp"
#include "lockstep/rank_environment.hpp"

namespace lockstep {

/// What SLURM's variables tell a launcher.
struct SlurmJob {
  std::string job_id;    ///< for --rdzv-id: the same on all hosts of a step
  bool in_step = false;  ///< started by srun; otherwise inside an allocation (sbatch, salloc)
  std::vector<std::string> hosts;   ///< [node] of the step, or of the allocation
  std::vector<int> tasks_per_node;  ///< [node]; empty if SLURM was not told
  int node_rank = 0;                ///< of this host; 0 outside a step
  std::string here;  ///< this host's name in `hosts`; "" if it is not one, such as a login node
  int task = 0;      ///< this launcher's number in the step
  std::optional<int> cpus_per_task;  ///< --cpus-per-task, if given
  int gpus = 0;                      ///< of the job on this host, as SLURM counts them
  int port = 0;                      ///< for the endpoint; derived from job and step

  int nnodes() const { return static_cast<int>(hosts.size()); }
  const std::string& endpoint_host() const { return hosts.front(); }
};

/// Returns nullopt outside of SLURM; contradictory variables are an Error (kWorld). `host_name` is
/// this host's own.
std::optional<SlurmJob> read_slurm(const RankEnvironment::Lookup& lookup,
                                   const std::string& host_name);

/// How a job is started under SLURM.
struct ClusterStart {
  std::string announcement;       ///< "SLURM job 1234: host 1 of 2 (node7)"
  std::vector<std::string> srun;  ///< if not empty: execute this instead, followed by the flags
};

/// Fills in what SLURM knows and no flag says: hosts, this host's number, the endpoint, the job's
/// name, and ranks per host. Inside an allocation of several hosts, or of one that is not this one
/// (salloc on a login node), the result is an srun command that starts one launcher on each. More
/// than one launcher per host is an Error (kLaunch).
ClusterStart apply_slurm(const SlurmJob& job, Settings& settings);

}  // namespace lockstep
