#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

/// The same for all processes on one GPU, whatever number each gives it.
using GpuUuid = std::array<char, 16>;

/// What a rank tells the others about where it computes. Plain bytes: it travels.
struct GpuCard {
  static constexpr size_t kMostReached = 16;  ///< so many GPUs has a large host

  int32_t on_gpu = 0;      ///< 0: on the CPU
  int32_t shares = 0;      ///< 1: other processes may use its memory and events (CUDA IPC)
  int32_t names_host = 0;  ///< 1: NCCL_HOSTID says what NCCL takes for its host
  GpuUuid uuid = {};
  char bus_id[16] = {};       ///< "0000:1b:00.0", for messages; ends in '\0'
  int32_t reached_count = 0;  ///< GPUs that this process sees, and whose memory this one reaches
  std::array<GpuUuid, kMostReached> reached = {};
};

/// Which backend moves the memory of the ranks' GPUs: "nccl", "ipc", or "" for none, so that it
/// goes through the host's. cards[rank]; the same answer on every rank. `asked` is what the user
/// wants: auto, nccl or ipc; what cannot be is an Error (kBackend) that names ranks and GPU.
std::string choose_gpu_backend(const std::string& asked, std::span<const GpuCard> cards,
                               bool one_host, bool has_nccl);

}  // namespace lockstep
