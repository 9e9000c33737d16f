#include "train/preemption.hpp"

#include <signal.h>

#include <array>
#include <atomic>
#include <mutex>

namespace lockstep {
namespace {

constexpr std::array<int, 2> kPreemptionSignals = {SIGTERM, SIGUSR1};

std::atomic<int> received_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);  // a signal handler writes it

std::mutex guards_mutex;  // guards all below
int guards = 0;
std::array<struct sigaction, kPreemptionSignals.size()> handlers_before;

void note_signal(int signal) {
  received_signal.store(signal);
}

}  // namespace

PreemptionSignals::PreemptionSignals() {
  const std::lock_guard lock(guards_mutex);
  if (guards++ > 0) return;
  received_signal = 0;
  for (size_t i = 0; i < kPreemptionSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = note_signal;
    ::sigemptyset(&action.sa_mask);
    action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
    ::sigaction(kPreemptionSignals[i], &action, &handlers_before[i]);
  }
}

PreemptionSignals::~PreemptionSignals() {
  const std::lock_guard lock(guards_mutex);
  if (--guards > 0) return;
  for (size_t i = 0; i < kPreemptionSignals.size(); ++i) {
    ::sigaction(kPreemptionSignals[i], &handlers_before[i], nullptr);
  }
}

int PreemptionSignals::received() {
  return received_signal.load();
}

}  // namespace lockstep
