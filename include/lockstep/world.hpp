#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/communicator.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/device.hpp"
#include "lockstep/rank_environment.hpp"

namespace lockstep {

/// Where this rank computes, and how it communicates.
struct WorldOptions {
  /// --devices: the logical devices of this host. If L ranks are on it, local rank r takes device r
  /// and, if there are more devices, also r + L, r + 2 L, … Empty: the host's GPUs, which ranks
  /// share if there are too few; without GPUs the cores, divided among all ranks.
  std::string devices = {};
  /// Number of devices per rank, for models with several stages on each.
  int devices_per_rank = 1;
  /// auto, self, shm, gloo, two_level, mpi, nccl or ipc. auto: self for one rank, shm on one host,
  /// two_level on several; on top of these, for ranks on GPUs, nccl if each has its own, ipc if
  /// ranks of one host share one. mpi, for ranks that mpirun or srun --mpi=pmix started, is never
  /// chosen automatically. If requested by name, shm, gloo, two_level and mpi take GPU tensors
  /// through the host's memory.
  std::string backend = "auto";
  /// Timeout of every wait for other ranks. Default: LOCKSTEP_TIMEOUT_S, or five minutes.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// This process among all that train together: its rank, its devices, its communicator. A program
/// that is started directly is a world of one; under `lockstep run`, torchrun, mpirun or srun the
/// same program is one rank of many.
class World {
 public:
  static World from_env(const WorldOptions& options = {});
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int rank() const { return environment().rank; }
  int size() const { return environment().world_size; }
  int local_rank() const { return environment().local_rank; }
  const RankEnvironment& environment() const;

  /// This rank's logical devices: WorldOptions::devices_per_rank of them.
  const Devices& devices() const;
  Device& device() const { return devices()[0]; }  ///< the first, or only one

  const Communicator& comm() const;

  /// This rank's page of the launcher's board; empty without a board.
  const std::optional<BoardPage>& board_page() const;

 private:
  struct State;
  explicit World(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
