#pragma once

#include <memory>
#include <string>

#include "base/cuda_stream.hpp"
#include "comm/backends.hpp"
#include "lockstep/device.hpp"
#include "lockstep/memory.hpp"
#include "world/gpu_choice.hpp"

// What communicators need of GPUs. The one place in src/world that asks whether this build has
// CUDA.

namespace lockstep {

/// Whether a name is a GPU backend's: nccl or ipc.
bool names_gpu_backend(const std::string& name);

/// Refuses a GPU backend that this build does not have (kBackend).
void require_gpu_backend_built(const std::string& name);

/// The backend over which the ranks' GPUs talk; null where their memory goes through the host's.
/// Collective over `host`, in builds with CUDA. `asked`: auto, nccl or ipc.
std::unique_ptr<Backend> meet_on_gpus(const std::string& asked, const Device& device, Backend& host,
                                      bool one_host, int64_t deadline_ns);

/// The backend of this name. Collective over options.host.
std::unique_ptr<Backend> make_gpu_backend(const std::string& name,
                                          const GpuBackendOptions& options);

/// The calling thread's current stream on a GPU; null in builds without CUDA.
CudaStream current_cuda_stream(int gpu);

/// The account that memory of the calling thread's current stream on a GPU is charged to; null
/// where no logical device has that stream.
MemoryAccount* current_gpu_account(int gpu);

}  // namespace lockstep
