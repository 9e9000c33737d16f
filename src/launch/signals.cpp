#include "launch/signals.hpp"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/file.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

const std::vector<SignalInfo>& known_signals() {
  static const std::vector<SignalInfo> signals = {
      {SIGTERM, "SIGTERM", true, true},     {SIGINT, "SIGINT", true, true},
      {SIGHUP, "SIGHUP", true, true},       {SIGQUIT, "SIGQUIT", true, true},
      {SIGUSR1, "SIGUSR1", false, true},    {SIGUSR2, "SIGUSR2", false, true},
      {SIGALRM, "SIGALRM", false, false},   {SIGCONT, "SIGCONT", false, false},
      {SIGXCPU, "SIGXCPU", false, false},   {SIGVTALRM, "SIGVTALRM", false, false},
      {SIGPROF, "SIGPROF", false, false},   {SIGURG, "SIGURG", false, false},
      {SIGWINCH, "SIGWINCH", false, false},
  };
  return signals;
}

const SignalInfo& signal_info(int number) {
  const auto& signals = known_signals();
  return *std::find_if(signals.begin(), signals.end(),
                       [number](const SignalInfo& info) { return info.number == number; });
}

SignalWatch::SignalWatch(const std::vector<int>& signals) {
  sigset_t watched;
  sigset_t passed_on;
  sigemptyset(&watched);
  sigemptyset(&passed_on);
  sigemptyset(&stopping_);
  struct sigaction hang_up {};
  ::sigaction(SIGHUP, nullptr, &hang_up);
  for (const int signal : signals) {
    // A blocked signal reaches a signalfd even if it is ignored.
    if (signal == SIGHUP && hang_up.sa_handler == SIG_IGN) continue;
    sigaddset(&watched, signal);
    sigaddset(signal_info(signal).stops ? &stopping_ : &passed_on, signal);
  }
  ::sigprocmask(SIG_BLOCK, &passed_on, &before_);
  descriptor_ = ::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  if (descriptor_ < 0) {
    const int reason = errno;
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    throw Error(Code::kLaunch, fmt::format("cannot watch for signals: {}", std::strerror(reason)),
                limit_help(reason, "check whether this machine is out of memory"));
  }
}

SignalWatch::~SignalWatch() {
  while (take() != 0) {
  }
  ::close(descriptor_);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

SignalWatch::WhileRanksRun::WhileRanksRun(const SignalWatch& watch) : watch_(watch) {
  while (watch_.take() != 0) {
  }
  ::sigprocmask(SIG_BLOCK, &watch_.stopping_, nullptr);
}

SignalWatch::WhileRanksRun::~WhileRanksRun() {
  while (watch_.take() != 0) {
  }
  ::sigprocmask(SIG_UNBLOCK, &watch_.stopping_, nullptr);
}

int SignalWatch::take() const {
  signalfd_siginfo info;
  return ::read(descriptor_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo)
                                                                  : 0;
}

}  // namespace lockstep
