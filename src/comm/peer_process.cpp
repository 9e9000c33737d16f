#include "comm/peer_process.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "base/process.hpp"

namespace lockstep {
namespace {

// '\0' if there is no such process.
char state_letter(pid_t pid) {
  const auto stat = read_process_stat(pid);
  return stat ? stat->state : '\0';
}

std::string state_text(char letter) {
  switch (letter) {
    case '\0':
    case 'Z':
    case 'X':
      return "has ended";
    case 'R':
      return "is running";
    case 'S':
      return "is waiting (state S)";
    case 'D':
      return "is waiting for a device (state D)";
    case 'T':
      return "is stopped by a signal (state T)";
    case 't':
      return "is stopped by a debugger (state t)";
    default:
      return fmt::format("is in state {}", letter);
  }
}

}  // namespace

ProcessHome ProcessHome::own() {
  ProcessHome home;
  if (std::FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (std::fgets(home.kernel.data(), static_cast<int>(home.kernel.size()), file) == nullptr) {
      home.kernel = {};
    }
    std::fclose(file);
  }
  home.pid_namespace = lockstep::pid_namespace();
  home.pid = ::getpid();
  return home;
}

PeerProcess::PeerProcess(pid_t pid) : pid_(pid), own_(pid == ::getpid()) {
  if (own_) return;
  const int watch = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (watch >= 0) watch_ = std::make_shared<const Descriptor>(watch);
}

bool PeerProcess::ended() const {
  if (own_) return false;
  if (watch_ == nullptr) {
    const char letter = state_letter(pid_);
    return letter == '\0' || letter == 'Z' || letter == 'X';
  }
  pollfd watched{.fd = watch_->get(), .events = POLLIN, .revents = 0};
  return ::poll(&watched, 1, 0) > 0;
}

std::vector<bool> PeerProcess::which_ended(std::span<const PeerProcess> processes) {
  std::vector<pollfd> watched;
  watched.reserve(processes.size());
  for (const PeerProcess& process : processes) {
    const bool by_watch = !process.own_ && process.watch_ != nullptr;
    watched.push_back(
        {.fd = by_watch ? process.watch_->get() : -1, .events = POLLIN, .revents = 0});
  }
  const bool looked = ::poll(watched.data(), watched.size(), 0) >= 0;
  std::vector<bool> ended;
  for (size_t i = 0; i < processes.size(); ++i) {
    const bool known = looked && watched[i].fd >= 0;
    ended.push_back(known ? watched[i].revents != 0 : processes[i].ended());
  }
  return ended;
}

bool PeerProcess::stopped() const {
  const char letter = own_ ? 'R' : state_letter(pid_);
  return letter == 'T' || letter == 't';
}

std::string PeerProcess::state() const {
  if (own_) return "is a thread of this process";
  return fmt::format("process {} {}", pid_, ended() ? "has ended" : state_text(state_letter(pid_)));
}

}  // namespace lockstep
