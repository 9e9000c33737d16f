#include "device/cuda/support.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "lockstep/clock.hpp"

namespace lockstep::cuda {
namespace {

constexpr auto kSamplePeriod = std::chrono::microseconds(500);

// Looks at every watched stream twice a millisecond and counts the time since the last look as busy
// when the stream has unfinished work. A query would spoil the capture of a stream, so that nothing
// is looked at while one goes on.
class BusyWatch {
 public:
  static BusyWatch& instance() {
    static auto* watch = new BusyWatch();
    return *watch;
  }

  void watch(c10::Stream stream, std::atomic<int64_t>& busy_ns) {
    const std::lock_guard lock(mutex_);
    watched_.push_back({stream, &busy_ns});
    if (!sampler_.joinable()) sampler_ = std::thread([this] { sample_for_ever(); });
  }

  void unwatch(std::atomic<int64_t>& busy_ns) {
    const std::lock_guard lock(mutex_);
    std::erase_if(watched_, [&](const Watched& watched) { return watched.busy_ns == &busy_ns; });
  }

  // No look is under way when this returns.
  void pause(int captures) {
    const std::lock_guard lock(mutex_);
    captures_ += captures;
  }

 private:
  struct Watched {
    c10::Stream stream;
    std::atomic<int64_t>* busy_ns;
  };

  static bool has_unfinished_work(c10::Stream stream) {
    const auto raw = c10::cuda::CUDAStream(stream).stream();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(raw, &status) != cudaSuccess ||
        status != cudaStreamCaptureStatusNone) {
      (void)cudaGetLastError();
      return false;
    }
    const bool unfinished = cudaStreamQuery(raw) == cudaErrorNotReady;
    (void)cudaGetLastError();  // "not ready" is an answer, not an error to leave behind
    return unfinished;
  }

  void sample_for_ever() {
    int64_t last_ns = monotonic_ns();
    for (;;) {
      std::this_thread::sleep_for(kSamplePeriod);
      const int64_t now_ns = monotonic_ns();
      const std::lock_guard lock(mutex_);
      for (const auto& watched : watched_) {
        if (captures_ > 0) break;
        // A GPU that has failed is its user's to report; this thread must not.
        if (cudaSetDevice(watched.stream.device_index()) != cudaSuccess) {
          (void)cudaGetLastError();
        } else if (has_unfinished_work(watched.stream)) {
          *watched.busy_ns += now_ns - last_ns;
        }
      }
      last_ns = now_ns;
    }
  }

  std::mutex mutex_;
  std::vector<Watched> watched_;
  int captures_ = 0;     // that go on
  std::thread sampler_;  // runs as long as the process
};

}  // namespace

void watch_busy(c10::Stream stream, std::atomic<int64_t>& busy_ns) {
  BusyWatch::instance().watch(stream, busy_ns);
}

void unwatch_busy(std::atomic<int64_t>& busy_ns) {
  BusyWatch::instance().unwatch(busy_ns);
}

PauseSampling::PauseSampling() {
  BusyWatch::instance().pause(1);
}

PauseSampling::~PauseSampling() {
  BusyWatch::instance().pause(-1);
}

int64_t capacity_bytes(int gpu) {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, gpu) == cudaSuccess
             ? static_cast<int64_t>(properties.totalGlobalMem)
             : 0;
}

}  // namespace lockstep::cuda
