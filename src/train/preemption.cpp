#include "train/preemption.hpp"

#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

namespace lockstep {
namespace {

constexpr std::array<int, 2> kPreemptionSignals = {SIGTERM, SIGUSR1};

// SLURM signals every process of a step, and so the ranks and their launcher, which passes the
// signal on: what comes again so soon is the same request.
constexpr int64_t kSameRequestNs = 1'000'000'000;

// A signal handler writes them.
std::atomic<int> received_signal{0};
std::array<std::atomic<int64_t>, kPreemptionSignals.size()> first_ns;  // 0: it has not come
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

std::mutex guards_mutex;  // guards all below
int guards = 0;
bool expected = false;
std::array<struct sigaction, kPreemptionSignals.size()> handlers_before;

void note_signal(int signal) {
  const int errno_before = errno;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ns = now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  int64_t first = 0;
  received_signal.store(signal);
  if (!first_ns[signal == SIGTERM ? size_t{0} : size_t{1}].compare_exchange_strong(first, now_ns) &&
      now_ns - first >= kSameRequestNs) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // when this handler has returned
  }
  errno = errno_before;
}

}  // namespace

PreemptionSignals::PreemptionSignals() {
  const std::lock_guard lock(guards_mutex);
  if (guards++ > 0) return;
  received_signal = 0;
  expected = false;
  for (auto& first : first_ns) first = 0;
  for (size_t i = 0; i < kPreemptionSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = note_signal;
    ::sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    struct sigaction before {};
    ::sigaction(kPreemptionSignals[i], &action, &before);
    if (before.sa_handler != note_signal) handlers_before[i] = before;
  }
}

PreemptionSignals::~PreemptionSignals() {
  const std::lock_guard lock(guards_mutex);
  if (--guards > 0) return;
  for (size_t i = 0; i < kPreemptionSignals.size(); ++i) {
    // A request that comes while the process ends must not kill it.
    if ((expected || first_ns[i] != 0) && handlers_before[i].sa_handler == SIG_DFL) continue;
    ::sigaction(kPreemptionSignals[i], &handlers_before[i], nullptr);
  }
}

int PreemptionSignals::received() {
  return received_signal.load();
}

void PreemptionSignals::expect() {
  const std::lock_guard lock(guards_mutex);
  expected = true;
}

}  // namespace lockstep
