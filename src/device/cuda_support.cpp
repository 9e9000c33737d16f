#include "device/cuda_support.hpp"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <map>
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

// A CUDA event that keeps its time.
struct TimedEvent {
  explicit TimedEvent(int on_gpu) : gpu(on_gpu) { C10_CUDA_CHECK(cudaEventCreate(&event)); }
  ~TimedEvent() { (void)cudaEventDestroy(event); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  int gpu;
  cudaEvent_t event = nullptr;
};

// Below 0 where the second came first.
int64_t elapsed_ns(const TimedEvent& first, const TimedEvent& second) {
  float ms = 0;
  C10_CUDA_CHECK(cudaEventElapsedTime(&ms, first.event, second.event));
  return static_cast<int64_t>(static_cast<double>(ms) * 1e6);
}

// A moment that both clocks know: CUDA tells the time between two events only.
struct Epoch {
  explicit Epoch(int gpu) : start(gpu) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(gpu));
    C10_CUDA_CHECK(cudaEventRecord(start.event, c10::cuda::getCurrentCUDAStream().stream()));
    C10_CUDA_CHECK(cudaEventSynchronize(start.event));
    host_ns = monotonic_ns();
  }

  TimedEvent start;
  int64_t host_ns = 0;
};

// A recent one: CUDA gives the time between two events as a float, which is fine for seconds only.
std::shared_ptr<const Epoch> epoch_of(int gpu) {
  constexpr int64_t kFreshNs = 5'000'000'000;
  static std::mutex mutex;
  static auto* epochs = new std::map<int, std::shared_ptr<const Epoch>>();
  const std::lock_guard lock(mutex);
  auto& epoch = (*epochs)[gpu];
  if (!epoch || monotonic_ns() - epoch->host_ns > kFreshNs) {
    epoch = std::make_shared<const Epoch>(gpu);
  }
  return epoch;
}

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

std::shared_ptr<void> record_time(c10::Stream stream) {
  const c10::cuda::CUDAStream on(stream);
  const c10::cuda::CUDAGuard guard(on.device());
  auto event = std::make_shared<TimedEvent>(on.device_index());
  C10_CUDA_CHECK(cudaEventRecord(event->event, on.stream()));
  return event;
}

int64_t time_ns(const std::shared_ptr<void>& event) {
  const auto& timed = *static_cast<const TimedEvent*>(event.get());
  C10_CUDA_CHECK(cudaEventSynchronize(timed.event));
  const auto epoch = epoch_of(timed.gpu);
  return epoch->host_ns + elapsed_ns(epoch->start, timed);
}

int64_t ns_between(const std::shared_ptr<void>& first, const std::shared_ptr<void>& second) {
  const auto& begin = *static_cast<const TimedEvent*>(first.get());
  const auto& end = *static_cast<const TimedEvent*>(second.get());
  C10_CUDA_CHECK(cudaEventSynchronize(begin.event));
  C10_CUDA_CHECK(cudaEventSynchronize(end.event));
  return elapsed_ns(begin, end);
}

bool is_reached(const std::shared_ptr<void>& event) {
  const auto status = cudaEventQuery(static_cast<const TimedEvent*>(event.get())->event);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

}  // namespace lockstep::cuda
