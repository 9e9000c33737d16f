#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

namespace lockstep {

/// A rank's place in its job, as the launcher told it through variables.
struct RankEnvironment {
  std::string launcher = "none";  ///< "lockstep", "torchrun", "mpirun", "srun", "variables", "none"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int restart_count = 0;
  std::string master_addr;  ///< rank 0's host; "" where nobody said
  int master_port = 0;      ///< 0: nobody said
  std::string session;      ///< the same on all ranks of this job and restart, on no others

  std::string board;       ///< LOCKSTEP_BOARD: the launcher's board; "" where there is none
  std::string store;       ///< LOCKSTEP_STORE: "host:port" of the launcher's store; "" or none
  std::string token;       ///< LOCKSTEP_TOKEN; "" or the secret of the job
  std::string host_cores;  ///< LOCKSTEP_HOST_CORES: "0,1,2-5", cores of the job on this host
  std::string backend;     ///< LOCKSTEP_BACKEND; "" is automatic
  std::optional<double> timeout_s;  ///< LOCKSTEP_TIMEOUT_S

  bool one_host() const { return local_world_size == world_size; }

  using Lookup = std::function<const char*(const char* name)>;  ///< as std::getenv

  /// Reads, in this order: RANK and WORLD_SIZE (lockstep run, torchrun, by hand), Open MPI's,
  /// MPICH's and Intel's (PMI), SLURM's step variables. None of them: a world of one. Variables
  /// that are incomplete or contradict each other are an Error (kWorld) that names them.
  static RankEnvironment from(const Lookup& lookup);
  static RankEnvironment from_env();
};

}  // namespace lockstep
