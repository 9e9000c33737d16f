#include "world/gpu_backends.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace lockstep::cuda {
namespace {

GpuUuid uuid_of(int gpu) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
  GpuUuid uuid;
  static_assert(sizeof uuid == sizeof properties.uuid.bytes);
  std::copy(std::begin(properties.uuid.bytes), std::end(properties.uuid.bytes), uuid.begin());
  return uuid;
}

}  // namespace

GpuInfo info_of(int gpu) {
  GpuInfo info;
  info.on_gpu = 1;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&info.shares, cudaDevAttrIpcEventSupport, gpu));
  info.names_host = std::getenv("NCCL_HOSTID") != nullptr ? 1 : 0;
  info.uuid = uuid_of(gpu);
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(info.bus_id, sizeof info.bus_id, gpu));
  int gpus = 0;
  C10_CUDA_CHECK(cudaGetDeviceCount(&gpus));
  for (int other = 0; other < gpus; ++other) {
    if (other == gpu || static_cast<size_t>(info.reached_count) == GpuInfo::kMostReached) continue;
    int reached = 0;
    C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&reached, gpu, other));
    if (reached == 0) continue;
    info.reached[static_cast<size_t>(info.reached_count)] = uuid_of(other);
    info.reached_count += 1;
  }
  return info;
}

CudaStream raw_stream(c10::Stream stream) {
  return c10::cuda::CUDAStream(stream).stream();
}

}  // namespace lockstep::cuda
