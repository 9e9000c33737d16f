#pragma once

#include <c10/core/Stream.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/cpu_allocator.hpp"
#include "device/own_stream.hpp"
#include "device/rng.hpp"
#include "device/worker.hpp"
#include "lockstep/device.hpp"

namespace lockstep {

/// Processor time of the threads that work for a device beside its worker.
class UserClock {
 public:
  void enter(pthread_t thread);
  void leave(pthread_t thread);
  int64_t total_ns() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<pthread_t, int64_t>> inside_;  // thread, its CPU time at entry
  int64_t past_ns_ = 0;
};

struct Device::State {
  explicit State(SlotPlan slot);

  torch::Device torch_device() const;

  /// Makes the calling thread work on this device's hardware.
  void enter_thread(Device& self);

  SlotPlan plan;
  MemoryAccount& account;
  CpuPool& cpu_pool;                    // used by CPU devices only
  std::optional<OwnStream> own_stream;  // of slots that share their GPU, but for the first
  std::optional<c10::Stream> stream;    // of GPU slots
  std::atomic<int64_t> gpu_busy_ns{0};
  UserClock users;
  pid_t process = getpid();

  std::mutex submit_mutex;  // guards rng's seeding and the order of posting
  DeviceRng rng;

  std::atomic<int64_t> sent_bytes{0};
  std::atomic<int64_t> received_bytes{0};

  std::atomic<Trace*> trace{nullptr};
  std::atomic<int> rank{0};

  std::optional<Worker> worker;  // last: its thread uses all of the above
};

}  // namespace lockstep
