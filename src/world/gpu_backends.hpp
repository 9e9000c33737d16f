#pragma once

#include <c10/core/Stream.h>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/cuda_stream.hpp"
#include "comm/backend.hpp"
#include "lockstep/device.hpp"
#include "lockstep/memory.hpp"

namespace lockstep {

/// The same for all processes on one GPU, whatever number each gives it.
using GpuUuid = std::array<char, 16>;

/// What the other ranks must know about where a rank computes. Trivially copyable, so that it can
/// be sent to them.
struct GpuInfo {
  static constexpr size_t kMostReached = 16;  ///< as many GPUs as a large host has

  int32_t on_gpu = 0;      ///< 0: on the CPU
  int32_t shares = 0;      ///< 1: other processes may use its memory and events (CUDA IPC)
  int32_t names_host = 0;  ///< 1: NCCL_HOSTID says what NCCL takes for its host
  GpuUuid uuid = {};
  char bus_id[16] = {};       ///< "0000:1b:00.0", for messages; ends in '\0'
  int32_t reached_count = 0;  ///< GPUs that this process sees, and whose memory this one reaches
  std::array<GpuUuid, kMostReached> reached = {};
};

/// Which backend moves the memory of the ranks' GPUs: "nccl", "ipc", or "" for none, so that it
/// goes through the host's. infos[rank]; the same answer on every rank. `asked` is what the user
/// wants: auto, nccl or ipc; what is impossible is an Error (kBackend) that names ranks and GPU.
std::string choose_gpu_backend(const std::string& asked, std::span<const GpuInfo> infos,
                               bool one_host, bool has_nccl);

// What communicators need of GPUs. The only file of src/world that asks whether this build has
// CUDA.

/// Whether a name is a GPU backend's: nccl or ipc.
bool names_gpu_backend(const std::string& name);

/// Refuses a GPU backend that this build does not have (kBackend).
void require_gpu_backend_built(const std::string& name);

/// The backend over which the ranks' GPUs talk; null if their memory goes through the host's.
/// Collective over `host`, in builds with CUDA. `asked`: auto, nccl or ipc.
std::unique_ptr<Backend> rendezvous_on_gpus(const std::string& asked, const Device& device,
                                            Backend& host, bool one_host, int64_t deadline_ns);

/// The backend of this name. Collective over options.host.
std::unique_ptr<Backend> make_gpu_backend(const std::string& name,
                                          const GpuBackendOptions& options);

/// The calling thread's current stream on a GPU; null in builds without CUDA.
CudaStream current_cuda_stream(int gpu);

/// The account that memory of the calling thread's current stream on a GPU is charged to; null
/// where no logical device has that stream.
MemoryAccount* current_gpu_account(int gpu);

// What src/world needs of CUDA's own headers; of builds with CUDA only.
namespace cuda {

/// Which GPU it is, and which others it reaches.
GpuInfo info_of(int gpu);

/// The stream as CUDA knows it.
CudaStream raw_stream(c10::Stream stream);

}  // namespace cuda

}  // namespace lockstep
