#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// What --backend, LOCKSTEP_BACKEND and WorldOptions::backend may be: "auto", "shm", "gloo", ...
std::vector<std::string> backend_names();

/// What the launcher tells a rank through environment variables.
struct RankEnvironment {
  std::string launcher = "none";  ///< "lockstep", "torchrun", "mpirun", "srun", "variables", "none"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int restart_count = 0;
  std::string master_addr;  ///< rank 0's host; "" if unknown
  int master_port = 0;      ///< 0 if unknown
  std::string session;      ///< the same on all ranks of this job and restart, and on no others

  std::string board;  ///< LOCKSTEP_BOARD: the launcher's board; "" if there is none
  std::string store;  ///< LOCKSTEP_STORE: "host:port" of the launcher's store; "" if there is none
  std::string token;  ///< LOCKSTEP_TOKEN: the secret of the job; "" if there is none
  std::string host_cores;  ///< LOCKSTEP_HOST_CORES: the job's cores on this host, "0,1,2-5"
  std::string backend;     ///< LOCKSTEP_BACKEND; "" is automatic
  std::optional<double> timeout_s;  ///< LOCKSTEP_TIMEOUT_S
  bool under_mpi = false;  ///< MPI can begin here: its mpirun, or srun with PMIx, started the ranks

  bool one_host() const { return local_world_size == world_size; }

  using Lookup = std::function<const char*(const char* name)>;  ///< as std::getenv

  /// Reads the first that are set of: RANK and WORLD_SIZE (lockstep run, torchrun, by hand), Open
  /// MPI's variables, those of MPICH and Intel MPI (PMI), SLURM's step variables. Without any it is
  /// a world of one. Throws an Error (kWorld) if variables are incomplete or contradict each other.
  static RankEnvironment from(const Lookup& lookup);
  static RankEnvironment from_env();
};

}  // namespace lockstep
