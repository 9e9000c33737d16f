#pragma once

#include <string>
#include <vector>

#include "launch/flags.hpp"
#include "launch/slurm.hpp"

namespace lockstep {

/// How a job under SLURM is started.
struct ClusterStart {
  std::string announcement;       ///< "SLURM job 1234: host 1 of 2 (node7)"
  std::vector<std::string> srun;  ///< to be executed instead, with the flags after it; or empty
};

/// Fills in what SLURM knows and no flag says: hosts, this host's number, the meeting, the job's
/// name, and ranks per host. Inside an allocation of several hosts, or of one that is not this one
/// (salloc on a login node), the answer is an srun that starts one launcher on each. More than one
/// launcher per host is an Error (kLaunch).
ClusterStart apply_slurm(const SlurmJob& job, Settings& settings);

}  // namespace lockstep
