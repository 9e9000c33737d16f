#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace lockstep {

/// What a rank tells the others about where it computes. Plain bytes: it travels.
struct GpuCard {
  int32_t on_gpu = 0;    ///< 0: on the CPU
  char uuid[16] = {};    ///< the same for all ranks on one GPU, whatever number each gives it
  char bus_id[16] = {};  ///< "0000:1b:00.0", for messages; ends in '\0'
};

/// Which backend moves the memory of the ranks' GPUs: "nccl", "ipc", or "" for none, so that it
/// goes through the host's. cards[rank]; the same answer on every rank. `asked` is what the user
/// wants: auto, nccl or ipc; what cannot be is an Error (kBackend) that names ranks and GPU.
std::string choose_gpu_backend(const std::string& asked, std::span<const GpuCard> cards,
                               bool one_host, bool has_nccl);

}  // namespace lockstep
