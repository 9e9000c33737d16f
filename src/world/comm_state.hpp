#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "base/hidden_amx.hpp"
#include "comm/backend.hpp"
#include "lockstep/communicator.hpp"
#include "world/side_stream.hpp"

namespace lockstep {

/// Of every wait for other ranks, where nobody said otherwise.
inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

/// What the copies of one Communicator share.
struct CommState {
  CommState(std::unique_ptr<Backend> on_host, std::chrono::milliseconds limit)
      : CommState(std::move(on_host), nullptr, -1, limit) {}
  CommState(std::unique_ptr<Backend> on_host, std::unique_ptr<Backend> on_gpu, int number_of_gpu,
            std::chrono::milliseconds limit)
      : host(std::move(on_host)), gpu(std::move(on_gpu)), gpu_index(number_of_gpu), timeout(limit) {
    avoid_hidden_amx();
  }

  /// Whether this communicator moves the memory of that device itself.
  bool reaches(torch::Device device) const {
    return gpu != nullptr && device.is_cuda() && device.index() == gpu_index;
  }

  /// For a call to `backend`: on a GPU in the order of the thread's current stream.
  CallContext context(const Backend& backend, const CallOptions& options) const;

  std::unique_ptr<Backend> host;
  std::unique_ptr<Backend>
      gpu;             // stands on host; null: a GPU's tensors go through the host's memory
  int gpu_index = -1;  // of this rank, as libtorch counts
  std::optional<SideStream> side;  // of calls on the GPU that were begun, from the first on
  std::chrono::milliseconds timeout;
  std::optional<BoardPage> page;
  CommStats stats;
};

}  // namespace lockstep
