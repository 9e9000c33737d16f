#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <vector>

#include "device/cuda/support.hpp"

namespace lockstep::cuda {
namespace {

// Streams are never destroyed: libtorch's allocator, and events that others recorded, may know them
// for as long as the process lives.
class FreeStreams {
 public:
  static FreeStreams& instance() {
    static auto* streams = new FreeStreams();
    return *streams;
  }

  c10::Stream take(int gpu) {
    const std::lock_guard lock(mutex_);
    auto& free = free_[gpu];
    if (free.empty()) return make(gpu);
    const c10::Stream stream = free.back();
    free.pop_back();
    return stream;
  }

  void give_back(c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    free_[stream.device_index()].push_back(stream);
  }

 private:
  static c10::Stream make(int gpu) {
    const auto index = static_cast<c10::DeviceIndex>(gpu);
    const c10::cuda::CUDAGuard guard(index);
    cudaStream_t raw = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
    return c10::cuda::getStreamFromExternal(raw, index).unwrap();
  }

  std::mutex mutex_;
  std::map<int, std::vector<c10::Stream>> free_;  // [GPU]
};

}  // namespace

c10::Stream take_stream(int gpu) {
  return FreeStreams::instance().take(gpu);
}

void give_back_stream(c10::Stream stream) {
  FreeStreams::instance().give_back(stream);
}

}  // namespace lockstep::cuda
