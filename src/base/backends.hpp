#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A library that is loaded at run time and moves data between ranks of any hosts.
struct ModuleInfo {
  std::string_view name;
  std::string_view file;        ///< "lockstep-gloo.so"
  std::string_view built_with;  ///< packages
  std::string_view runs_with;   ///< packages
  std::string_view instead;     ///< what to use without it
};

/// What is known of a backend without making one.
struct BackendInfo {
  std::string_view name;  ///< as --backend, LOCKSTEP_BACKEND and WorldOptions::backend name it
  bool one_rank = false;  ///< serves a world of one rank only
  bool one_host = false;  ///< serves the ranks of one host only
  bool over_tcp = false;  ///< has connections between all ranks, even on one host
  bool on_gpus = false;   ///< moves the memory of GPUs, on top of another backend
  const ModuleInfo* module = nullptr;  ///< null: needs none
  /// What must start the ranks, if `lockstep run` cannot; empty otherwise.
  std::array<std::string_view, 2> launchers = {};

  bool has_own_launcher() const { return !launchers[0].empty(); }
};

inline constexpr ModuleInfo kGlooModule = {"gloo", "lockstep-gloo.so", "libgloo-dev", "libgloo0",
                                           "ranks of one host need no Gloo: use backend shm"};
inline constexpr ModuleInfo kMpiModule = {"mpi", "lockstep-mpi.so",
                                          "an MPI (Debian's libopenmpi-dev)",
                                          "that MPI's libraries", "backend gloo needs no MPI"};

/// All backends. Launcher, programs, doctor and World read this table.
inline constexpr std::array kBackends = {
    BackendInfo{.name = "self", .one_rank = true, .one_host = true},
    BackendInfo{.name = "shm", .one_host = true},
    BackendInfo{.name = "gloo", .over_tcp = true, .module = &kGlooModule},
    BackendInfo{.name = "two_level", .over_tcp = true, .module = &kGlooModule},
    BackendInfo{.name = "mpi",
                .over_tcp = true,
                .module = &kMpiModule,
                .launchers = {"mpirun -n N", "srun --mpi=pmix"}},
    BackendInfo{.name = "nccl", .on_gpus = true},
    BackendInfo{.name = "ipc", .one_host = true, .on_gpus = true},
};

/// The backend of this name; nullptr for "auto" and names of none.
const BackendInfo* find_backend(std::string_view name);

/// "auto" and the backends with which `lockstep run` can start ranks, on several hosts or on one.
std::vector<std::string> launched_backends(bool several_hosts = false);

/// "a, b or c".
std::string alternatives(const std::vector<std::string>& words);

}  // namespace lockstep
