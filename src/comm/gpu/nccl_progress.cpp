#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_progress.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// Of the driver, which this library is not linked with: it must load where there is no GPU.
WriteValue write_value() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000,
                                                cudaEnableDefault, &status),
               "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess) {
      throw Error(Code::kBackend, "the NVIDIA driver has no cuStreamWriteValue32",
                  "update the driver, or use --backend shm or gloo");
    }
    return reinterpret_cast<WriteValue>(found);
  }();
  return function;
}

}  // namespace

NcclProgress::NcclProgress(CudaStream stream) : stream_(stream), words_(2 * sizeof(uint32_t)) {
  for (int word = 0; word < 2; ++word) {
    reinterpret_cast<uint32_t*>(words_.data())[word] = 0;
  }
}

uint32_t NcclProgress::queue(const std::function<void()>& call) {
  ++number_;
  mark(0, number_);
  call();
  mark(1, number_);
  return number_;
}

void NcclProgress::mark(int word, uint32_t number) const {
  const auto at = reinterpret_cast<CUdeviceptr>(reinterpret_cast<uint32_t*>(words_.data()) + word);
  if (write_value()(stream_, at, number, 0) != CUDA_SUCCESS) {
    check_cuda(cudaStreamQuery(stream_), "cuStreamWriteValue32");
    throw Error(Code::kBackend, "cuStreamWriteValue32 failed",
                "update the NVIDIA driver, or use --backend shm or gloo");
  }
}

// The difference counts: numbers start again from 0 some day.
bool NcclProgress::has_reached(int word, uint32_t number) const {
  auto& written = reinterpret_cast<uint32_t*>(words_.data())[word];
  const uint32_t latest = std::atomic_ref(written).load(std::memory_order_acquire);
  return static_cast<int32_t>(latest - number) >= 0;
}

}  // namespace lockstep

#endif
