#include "device/cuda/time.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <map>
#include <mutex>

#include "lockstep/clock.hpp"

namespace lockstep::cuda {
namespace {

// A CUDA event that keeps its time.
struct TimedEvent {
  explicit TimedEvent(c10::DeviceIndex on_gpu) : gpu(on_gpu) {
    const c10::cuda::CUDAGuard guard(gpu);
    C10_CUDA_CHECK(cudaEventCreate(&event));
  }
  ~TimedEvent() { (void)cudaEventDestroy(event); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void record(cudaStream_t stream) const {
    const c10::cuda::CUDAGuard guard(gpu);
    C10_CUDA_CHECK(cudaEventRecord(event, stream));
  }
  void wait() const { C10_CUDA_CHECK(cudaEventSynchronize(event)); }

  c10::DeviceIndex gpu;
  cudaEvent_t event = nullptr;
};

const TimedEvent& timed(const std::shared_ptr<void>& event) {
  return *static_cast<const TimedEvent*>(event.get());
}

int64_t elapsed_ns(const TimedEvent& first, const TimedEvent& second) {
  float ms = 0;
  C10_CUDA_CHECK(cudaEventElapsedTime(&ms, first.event, second.event));
  return static_cast<int64_t>(static_cast<double>(ms) * 1e6);
}

// A moment that both clocks know: CUDA tells the time between two events only.
struct Epoch {
  std::shared_ptr<const TimedEvent> event;
  int64_t host_ns = 0;
};

// What a GPU's times are told by. It has a stream of its own, on which nothing is ever queued but
// the event that both clocks see, so that asking for the time waits for nobody's work.
class GpuClock {
 public:
  explicit GpuClock(c10::DeviceIndex gpu) : gpu_(gpu) {
    const c10::cuda::CUDAGuard guard(gpu);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  int64_t time_ns(const TimedEvent& event) {
    const std::lock_guard lock(mutex_);
    if (!epoch_.event || monotonic_ns() - epoch_.host_ns > kFreshNs) epoch_ = look_at_both();
    return epoch_.host_ns + elapsed_ns(*epoch_.event, event);
  }

 private:
  // CUDA gives the time between two events as a float, which is fine for seconds only.
  static constexpr int64_t kFreshNs = 5'000'000'000;
  static constexpr int kLooks = 5;

  // The event lies between two looks at the host's clock; the closest pair tells best where.
  Epoch look_at_both() const {
    Epoch best;
    int64_t best_apart_ns = std::numeric_limits<int64_t>::max();
    for (int look = 0; look < kLooks; ++look) {
      const auto event = std::make_shared<const TimedEvent>(gpu_);
      const int64_t before_ns = monotonic_ns();
      event->record(stream_);
      event->wait();
      const int64_t apart_ns = monotonic_ns() - before_ns;
      if (apart_ns >= best_apart_ns) continue;
      best_apart_ns = apart_ns;
      best = {event, before_ns + apart_ns / 2};
    }
    return best;
  }

  const c10::DeviceIndex gpu_;
  cudaStream_t stream_ = nullptr;  // lives as long as the process
  std::mutex mutex_;
  Epoch epoch_;
};

GpuClock& clock_of(c10::DeviceIndex gpu) {
  static std::mutex mutex;
  static auto* clocks = new std::map<c10::DeviceIndex, GpuClock>();
  const std::lock_guard lock(mutex);
  return clocks->try_emplace(gpu, gpu).first->second;
}

}  // namespace

std::shared_ptr<void> record_time(c10::Stream stream) {
  const c10::cuda::CUDAStream on(stream);
  auto event = std::make_shared<TimedEvent>(on.device_index());
  event->record(on.stream());
  return event;
}

int64_t time_ns(const std::shared_ptr<void>& event) {
  timed(event).wait();
  return clock_of(timed(event).gpu).time_ns(timed(event));
}

int64_t ns_between(const std::shared_ptr<void>& first, const std::shared_ptr<void>& second) {
  timed(first).wait();
  timed(second).wait();
  return elapsed_ns(timed(first), timed(second));
}

bool is_reached(const std::shared_ptr<void>& event) {
  const auto status = cudaEventQuery(timed(event).event);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

}  // namespace lockstep::cuda
