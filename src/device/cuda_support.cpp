#include "device/cuda_support.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "lockstep/clock.hpp"

namespace lockstep::cuda {
namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

constexpr auto kSamplePeriod = std::chrono::microseconds(500);

// Follows libtorch's CUDA allocator and charges each block to the account of the stream it was
// allocated for. The autograd engine replays a forward's stream, so backward is charged rightly
// too.
class MemoryWatch {
 public:
  static MemoryWatch& instance() {
    static auto* watch = new MemoryWatch();
    return *watch;
  }

  void watch(c10::Stream stream, MemoryAccount& account) {
    const std::lock_guard lock(mutex_);
    accounts_[key_of(stream)].push_back(&account);
  }

  // Blocks that are still live stay charged: accounts outlive devices.
  void unwatch(c10::Stream stream, MemoryAccount& account) {
    const std::lock_guard lock(mutex_);
    std::erase(accounts_[key_of(stream)], &account);
  }

 private:
  using StreamKey = std::pair<int, void*>;  // GPU, raw stream

  struct Block {
    MemoryAccount* account;
    int64_t bytes;
  };

  MemoryWatch() {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
        [this](const TraceEntry& entry) { on_entry(entry); });
  }

  static StreamKey key_of(c10::Stream stream) {
    return {stream.device_index(), c10::cuda::CUDAStream(stream).stream()};
  }

  // Called by the allocator while it holds its own lock: no CUDA call may be made here.
  void on_entry(const TraceEntry& entry) {
    const std::lock_guard lock(mutex_);
    if (entry.action_ == TraceEntry::ALLOC) {
      const auto found = accounts_.find({entry.device_, entry.stream_});
      if (found == accounts_.end() || found->second.empty()) return;
      MemoryAccount* account = found->second.back();
      const auto bytes = static_cast<int64_t>(entry.size_);
      account->charge(bytes);
      blocks_[entry.addr_] = {account, bytes};
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
      const auto found = blocks_.find(entry.addr_);
      if (found == blocks_.end()) return;
      found->second.account->release(found->second.bytes);
      blocks_.erase(found);
    }
  }

  std::mutex mutex_;
  std::map<StreamKey, std::vector<MemoryAccount*>> accounts_;
  std::unordered_map<size_t, Block> blocks_;  // [address]
};

// Looks at every watched stream twice a millisecond and counts the time since the last look as busy
// when the stream has unfinished work. Streams under graph capture must not be queried and are left
// out.
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

void watch_memory(c10::Stream stream, MemoryAccount& account) {
  MemoryWatch::instance().watch(stream, account);
}

void watch_busy(c10::Stream stream, std::atomic<int64_t>& busy_ns) {
  BusyWatch::instance().watch(stream, busy_ns);
}

void unwatch_memory(c10::Stream stream, MemoryAccount& account) {
  MemoryWatch::instance().unwatch(stream, account);
}

void unwatch_busy(std::atomic<int64_t>& busy_ns) {
  BusyWatch::instance().unwatch(busy_ns);
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
  float since_ms = 0;  // below 0 where the event is older
  C10_CUDA_CHECK(cudaEventElapsedTime(&since_ms, epoch->start.event, timed.event));
  return epoch->host_ns + static_cast<int64_t>(static_cast<double>(since_ms) * 1e6);
}

}  // namespace lockstep::cuda
