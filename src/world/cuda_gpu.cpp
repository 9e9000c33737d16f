#include "world/cuda_gpu.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

namespace lockstep::cuda {

GpuCard card_of(int gpu) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
  GpuCard card;
  card.on_gpu = 1;
  static_assert(sizeof card.uuid == sizeof properties.uuid.bytes);
  std::copy(std::begin(properties.uuid.bytes), std::end(properties.uuid.bytes), card.uuid);
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(card.bus_id, sizeof card.bus_id, gpu));
  return card;
}

CudaStream raw_stream(c10::Stream stream) {
  return c10::cuda::CUDAStream(stream).stream();
}

}  // namespace lockstep::cuda
