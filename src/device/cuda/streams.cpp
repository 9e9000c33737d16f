#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "device/cuda/support.hpp"
#include "lockstep/clock.hpp"

// Streams of GPUs: handing them out, timing events on them, sampling their busy time.

namespace lockstep::cuda {
namespace {

// Streams are never destroyed: libtorch's allocator, and events that others recorded, may refer to
// them as long as the process lives.
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

// A point in time on both clocks: CUDA gives only the time between two events.
struct Epoch {
  std::shared_ptr<const TimedEvent> event;
  int64_t host_ns = 0;
};

// Converts a GPU's event times to monotonic_ns(). It has a stream of its own for the event of the
// epoch, so that it never waits for other work.
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
  // CUDA gives the time between two events as a float, which is precise enough only for seconds.
  static constexpr int64_t kFreshNs = 5'000'000'000;
  static constexpr int kLooks = 5;

  // The event lies between two readings of the host's clock. The closest pair is the most precise.
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

constexpr auto kSamplePeriod = std::chrono::microseconds(500);

// Samples every watched stream twice per millisecond. If a stream has unfinished work, the time
// since the last sample counts as busy. A query would invalidate the capture of a stream, so
// nothing is sampled during a capture.
class BusyWatch {
 public:
  static BusyWatch& instance() {
    static auto* watch = new BusyWatch();
    return *watch;
  }

  void watch(c10::Stream stream, std::atomic<int64_t>& busy_ns) {
    const std::lock_guard lock(mutex_);
    watched_.push_back({stream, &busy_ns});
    if (!sampler_.joinable()) sampler_ = std::thread([this] { sample_forever(); });
  }

  void unwatch(std::atomic<int64_t>& busy_ns) {
    const std::lock_guard lock(mutex_);
    std::erase_if(watched_, [&](const Watched& watched) { return watched.busy_ns == &busy_ns; });
  }

  // No sampling is in progress when this returns.
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
    (void)cudaGetLastError();  // "not ready" must not remain as the last error
    return unfinished;
  }

  void sample_forever() {
    int64_t last_ns = monotonic_ns();
    for (;;) {
      std::this_thread::sleep_for(kSamplePeriod);
      const int64_t now_ns = monotonic_ns();
      const std::lock_guard lock(mutex_);
      for (const auto& watched : watched_) {
        if (captures_ > 0) break;
        // A failed GPU is reported by the thread that uses it, not by this one.
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
  int captures_ = 0;     // in progress
  std::thread sampler_;  // runs as long as the process
};

}  // namespace

c10::Stream take_stream(int gpu) {
  return FreeStreams::instance().take(gpu);
}

void give_back_stream(c10::Stream stream) {
  FreeStreams::instance().give_back(stream);
}

int64_t capacity_bytes(int gpu) {
  cudaDeviceProp properties{};
  return cudaGetDeviceProperties(&properties, gpu) == cudaSuccess
             ? static_cast<int64_t>(properties.totalGlobalMem)
             : 0;
}

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

}  // namespace lockstep::cuda
