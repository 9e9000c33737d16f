#include "launch/worker_group.hpp"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/limits.hpp"
#include "launch/output.hpp"
#include "launch/sweep.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSweepNs = 10'000'000'000;

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
  keeper_ = linked ? ::fork() : -1;
  if (keeper_ == 0) {
    ::close(ends[0]);
    run_keeper(workers, leftovers, ends[1], worker_signals);
  }
  const int reason = errno;
  close_write_ends(workers);
  if (linked) ::close(ends[1]);
  if (keeper_ < 0) {
    if (linked) ::close(ends[0]);
    fail_start(workers[0], reason, files_for_ranks(static_cast<int>(workers.size())));
  }
  link_ = ends[0];
  try {
    wait_until_started(workers);
  } catch (...) {
    ::close(link_);
    ::waitpid(keeper_, nullptr, 0);
    throw;
  }
}

void WorkerGroup::wait_until_started(const std::vector<WorkerStart>& workers) {
  while (pids_.size() < workers.size()) {
    const auto message = receive(true);
    if (!message) {
      throw Error(Code::kLaunch, "the process that was to start the ranks was killed",
                  "start the job again; nothing is left of it");
    }
    if (message->kind == KeeperMessage::Kind::kNotStarted) {
      fail_start(workers[static_cast<size_t>(message->worker)], static_cast<int>(message->value),
                 files_for_ranks(static_cast<int>(workers.size())));
    }
    pids_.push_back(static_cast<pid_t>(message->value));
  }
}

WorkerGroup::~WorkerGroup() {
  sweep();
  ::close(link_);
}

std::optional<KeeperMessage> WorkerGroup::receive(bool wait) {
  KeeperMessage message;
  ssize_t bytes = 0;
  do {
    bytes = ::recv(link_, &message, sizeof(message), wait ? 0 : MSG_DONTWAIT);
  } while (bytes < 0 && errno == EINTR);
  if (bytes == static_cast<ssize_t>(sizeof(message))) return message;
  if (bytes == 0 || (bytes < 0 && errno != EAGAIN)) lost_ = true;
  return std::nullopt;
}

std::optional<WorkerEnd> WorkerGroup::take_end() {
  if (lost_) return std::nullopt;
  const auto message = receive(false);
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
}

void WorkerGroup::sweep() {
  if (swept_) return;
  const char ask = 1;
  if (!lost_ && ::send(link_, &ask, 1, MSG_NOSIGNAL) == 1) {
    while (const auto message = receive(true)) {
      if (message->kind == KeeperMessage::Kind::kSwept) break;
    }
  }
  swept_ = true;
  if (lost_) sweep_children(monotonic_ns() + kSweepNs);
  ::waitpid(keeper_, nullptr, 0);
}

}  // namespace lockstep
