#include "base/running_clock.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/process.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kTick(250);

class RunningClock {
 public:
  // Never destroyed: the ticking thread uses it until the process ends.
  static RunningClock& instance() {
    static auto* clock = new RunningClock;
    return *clock;
  }

  int64_t now_ns() {
    const std::lock_guard lock(mutex_);
    if (!ticking_) start();
    return std::min(monotonic_ns(), tick_ns_ + kLongestGapNs) - stopped_ns_;
  }

 private:
  // A forked child has none of its parent's threads and starts its own when it first needs it.
  RunningClock() {
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] {
                       instance().ticking_ = false;
                       instance().mutex_.unlock();
                     });
  }

  void start() {
    tick();
    try {
      start_quiet_thread([this] { tick_forever(); }).detach();
      ticking_ = true;
    } catch (const std::exception&) {
      // Without a thread, the clock ticks whenever it is read.
    }
  }

  void tick_forever() {
    for (;;) {
      std::this_thread::sleep_for(kTick);
      const std::lock_guard lock(mutex_);
      tick();
    }
  }

  void tick() {
    const int64_t now_ns = monotonic_ns();
    if (tick_ns_ != 0 && ticking_) {
      stopped_ns_ += std::max<int64_t>(0, now_ns - tick_ns_ - kLongestGapNs);
    }
    tick_ns_ = now_ns;
  }

  std::mutex mutex_;  // guards what follows
  bool ticking_ = false;
  int64_t tick_ns_ = 0;
  int64_t stopped_ns_ = 0;
};

}  // namespace

int64_t running_ns() {
  return RunningClock::instance().now_ns();
}

}  // namespace lockstep
