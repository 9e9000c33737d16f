#include "launch/signal_watch.hpp"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/limits.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

SignalWatch::SignalWatch() {
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT}) sigaddset(&watched, signal);
  struct sigaction hang_up {};
  ::sigaction(SIGHUP, nullptr, &hang_up);
  // A blocked signal reaches a signalfd even where it is ignored.
  if (hang_up.sa_handler != SIG_IGN) sigaddset(&watched, SIGHUP);
  ::sigprocmask(SIG_BLOCK, &watched, &before_);
  descriptor_ = ::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  if (descriptor_ < 0) {
    const int reason = errno;
    throw Error(Code::kLaunch, fmt::format("cannot watch for signals: {}", std::strerror(reason)),
                limit_help(reason, "see whether this machine lacks memory"));
  }
}

SignalWatch::~SignalWatch() {
  while (take() != 0) {
  }
  ::close(descriptor_);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

int SignalWatch::take() const {
  signalfd_siginfo info;
  return ::read(descriptor_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo)
                                                                  : 0;
}

}  // namespace lockstep
