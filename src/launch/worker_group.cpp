#include "launch/worker_group.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/limits.hpp"
#include "base/running_clock.hpp"
#include "launch/output.hpp"
#include "launch/sweep.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSweepNs = 10'000'000'000;
constexpr int64_t kKeeperNs = 12'000'000'000;  // the keeper's own sweep may take ten seconds
constexpr int kStartLookMs = 250;

void close_write_ends(const std::vector<WorkerStart>& workers) {
  for (const auto& worker : workers) {
    ::close(worker.output);
    ::close(worker.errors);
  }
}

[[noreturn]] void fail_start(const WorkerStart& worker, int reason, int files_needed) {
  std::string help = "see whether this machine lacks memory or processes (ulimit -u)";
  if (reason == ENOEXEC) help = "it is neither a program for this machine nor a script with #!";
  if (reason == ENOENT) help = "the interpreter in its first line (#!) does not exist";
  throw Error(Code::kLaunch, fmt::format("cannot start {}: {}", worker.path, std::strerror(reason)),
              limit_help(reason, help, files_needed));
}

}  // namespace

int WorkerEnd::exit_code() const {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int WorkerEnd::signal() const {
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

WorkerGroup::WorkerGroup(std::vector<WorkerStart> workers, const Leftovers& leftovers,
                         const sigset_t& worker_signals) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::array<int, 2> ends{};
  const bool linked = ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0;
  guard_ = linked ? ::fork() : -1;
  if (guard_ == 0) {
    ::close(ends[0]);
    run_guard(workers, leftovers, ends[1], worker_signals);
  }
  const int reason = errno;
  close_write_ends(workers);
  if (linked) ::close(ends[1]);
  if (guard_ < 0) {
    if (linked) ::close(ends[0]);
    fail_start(workers[0], reason, files_for_ranks(static_cast<int>(workers.size())));
  }
  link_ = ends[0];
  try {
    wait_until_started(workers);
  } catch (...) {
    ::close(link_);
    ::waitpid(guard_, nullptr, 0);
    throw;
  }
}

// A keeper that somebody stops now must not keep the launcher here, where no signal is taken.
void WorkerGroup::wait_until_started(const std::vector<WorkerStart>& workers) {
  while (pids_.size() < workers.size()) {
    const auto message = receive(kStartLookMs);
    if (!message && !lost_) {
      ::kill(guard_, SIGCONT);
      if (keeper_ > 0) ::kill(keeper_, SIGCONT);
      continue;
    }
    if (!message) {
      throw Error(Code::kLaunch, "the process that was to start the ranks was killed",
                  "start the job again; nothing is left of it");
    }
    if (message->kind == KeeperMessage::Kind::kNotStarted) {
      fail_start(workers[static_cast<size_t>(message->worker)], static_cast<int>(message->value),
                 files_for_ranks(static_cast<int>(workers.size())));
    }
    if (message->kind == KeeperMessage::Kind::kKeeper) {
      keeper_ = static_cast<pid_t>(message->value);
    } else {
      pids_.push_back(static_cast<pid_t>(message->value));
    }
  }
}

WorkerGroup::~WorkerGroup() {
  sweep();
  ::close(link_);
}

std::optional<KeeperMessage> WorkerGroup::receive(int timeout_ms) {
  pollfd readable{link_, POLLIN, 0};
  while (timeout_ms != 0 && ::poll(&readable, 1, timeout_ms) < 0 && errno == EINTR) {
  }
  KeeperMessage message;
  ssize_t bytes = 0;
  do {
    bytes = ::recv(link_, &message, sizeof(message), MSG_DONTWAIT);
  } while (bytes < 0 && errno == EINTR);
  if (bytes == static_cast<ssize_t>(sizeof(message))) return message;
  if (bytes == 0 || (bytes < 0 && errno != EAGAIN)) lost_ = true;
  return std::nullopt;
}

std::optional<WorkerEnd> WorkerGroup::take_end() {
  if (lost_) return std::nullopt;
  const auto message = receive(0);
  if (!message || message->kind != KeeperMessage::Kind::kEnded) return std::nullopt;
  return WorkerEnd{message->worker, static_cast<int>(message->value), message->at_ns};
}

pid_t WorkerGroup::pid(int worker) const {
  return pids_.at(static_cast<size_t>(worker));
}

void WorkerGroup::signal_all(int signal) const {
  if (lost_ || swept_) return;  // their numbers may be others' by now
  for (const pid_t pid : pids_) {
    ::kill(-pid, signal);
    if (signal != SIGKILL) ::kill(-pid, SIGCONT);
  }
  ::kill(keeper_, SIGCONT);
}

void WorkerGroup::signal_one(int worker, int signal) const {
  if (!lost_ && !swept_) ::kill(pid(worker), signal);
}

// Somebody may have stopped the keeper or the guard, and a debugger may hold them so. Neither may
// keep the launcher from ending: what they cannot do in time is done without them.
void WorkerGroup::sweep() {
  if (swept_) return;
  const bool by_keeper = !lost_ && sweep_by_keeper();
  if (!by_keeper && !lost_) ::kill(keeper_, SIGKILL);
  swept_ = true;
  ::kill(guard_, SIGCONT);
  const bool by_guard = guard_ends(running_ns() + kKeeperNs);
  if (!by_guard) ::kill(guard_, SIGKILL);
  if (!by_keeper || !by_guard) sweep_children(monotonic_ns() + kSweepNs);
  if (!by_guard) ::waitpid(guard_, nullptr, 0);
}

bool WorkerGroup::sweep_by_keeper() {
  ::kill(keeper_, SIGCONT);
  const char ask = 1;
  if (::send(link_, &ask, 1, MSG_NOSIGNAL) != 1) return false;
  const int64_t deadline_ns = running_ns() + kKeeperNs;
  while (running_ns() < deadline_ns && !lost_) {
    const auto message = receive(100);
    if (message && message->kind == KeeperMessage::Kind::kSwept) return true;
  }
  return false;
}

bool WorkerGroup::guard_ends(int64_t deadline_ns) const {
  while (::waitpid(guard_, nullptr, WNOHANG) == 0) {
    if (running_ns() >= deadline_ns) return false;
    ::poll(nullptr, 0, 1);
  }
  return true;
}

}  // namespace lockstep
