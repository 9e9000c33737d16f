#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/rank_environment.hpp"

namespace lockstep {

/// What SLURM's variables say to a launcher.
struct SlurmJob {
  std::string job_id;    ///< for --rdzv-id: the same on all hosts of a step
  bool in_step = false;  ///< started by srun; otherwise inside an allocation (sbatch, salloc)
  std::vector<std::string> hosts;   ///< [node] of the step, or of the allocation
  std::vector<int> tasks_per_node;  ///< [node]; empty where SLURM was not told
  int node_rank = 0;                ///< of this host; 0 outside a step
  std::string here;  ///< this host's name in `hosts`; "": it is not one of them, as a login node
  int task = 0;      ///< of the step: this launcher's own number
  std::optional<int> cpus_per_task;  ///< --cpus-per-task, where given
  int port = 0;                      ///< for the endpoint: derived from the job and step

  int nnodes() const { return static_cast<int>(hosts.size()); }
  const std::string& endpoint_host() const { return hosts.front(); }
};

/// nullopt outside of SLURM; variables that contradict each other are an Error (kWorld).
/// `host_name` is this host's own.
std::optional<SlurmJob> read_slurm(const RankEnvironment::Lookup& lookup,
                                   const std::string& host_name);

}  // namespace lockstep
