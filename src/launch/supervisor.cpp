#include "launch/supervisor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/file.hpp"
#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "launch/output.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

// From the supervisor to the launcher, in the order in which the kernel saw the events.
struct SupervisorMessage {
  enum class Kind : int32_t {
    kSupervisor,  // the first message. value: the supervisor's process id
    kStarted,     // value: process id
    kNotStarted,  // value: errno; nothing is left running
    kEnded,       // value: wait status
    kSwept        // the last message. value: how many processes were still alive
  };
  Kind kind = Kind::kSwept;
  int32_t worker = -1;
  int64_t value = 0;
  int64_t at_ns = 0;
};

namespace {

constexpr int64_t kSweepNs = 10'000'000'000;
constexpr int64_t kSupervisorNs = 12'000'000'000;  // its own sweep may take ten seconds
constexpr int kReapOrphansMs = 2000;
constexpr int kAskMs = 5;
constexpr int kStartLookMs = 250;
constexpr int32_t kLink = -1;  // marks the link among the workers in epoll

// If the kernel does not list children: looks for this process among all parents.
std::vector<pid_t> list_by_parent() {
  std::vector<pid_t> children;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::strtol(name.c_str(), nullptr, 10));
    const auto stat = read_process_stat(pid);
    if (stat && stat->parent == ::getpid()) children.push_back(pid);
  }
  return children;
}

bool is_zombie(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid;
}

// The children of this process, including zombies and, in a subreaper, orphaned descendants.
std::vector<pid_t> list_children() {
  std::error_code failed;
  std::vector<pid_t> children;
  const std::filesystem::directory_iterator tasks("/proc/self/task", failed);
  for (const auto& task : tasks) {
    std::ifstream file(task.path() / "children");
    if (!file) return list_by_parent();
    for (pid_t pid = 0; file >> pid;) children.push_back(pid);
  }
  return failed ? list_by_parent() : children;
}

// Kills and reaps every child, then those that become children of this subreaper thereby, until
// none is left or the deadline has passed. Only children are killed: no other process can reap
// them, so their numbers cannot belong to other processes. Returns how many were still alive.
int sweep_children(int64_t deadline_ns) {
  std::set<pid_t> killed;
  for (;;) {
    for (const pid_t child : list_children()) {
      if (killed.contains(child) || is_zombie(child)) continue;
      ::kill(child, SIGKILL);
      killed.insert(child);
    }
    pid_t reaped = 0;
    do {
      reaped = ::waitpid(-1, nullptr, WNOHANG);
    } while (reaped > 0 || (reaped < 0 && errno == EINTR));
    if (reaped < 0 || monotonic_ns() > deadline_ns) return static_cast<int>(killed.size());
    ::poll(nullptr, 0, 1);
  }
}

// A WorkerStart as C arrays.
struct ExecPlan {
  const WorkerStart& worker;
  std::vector<char*> argv;
  std::vector<char*> envp;
  cpu_set_t cores;

  explicit ExecPlan(const WorkerStart& start) : worker(start) {
    for (const auto& word : start.arguments) argv.push_back(const_cast<char*>(word.c_str()));
    for (const auto& entry : start.environment) envp.push_back(const_cast<char*>(entry.c_str()));
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    CPU_ZERO(&cores);
    for (const int core : start.cores) CPU_SET(static_cast<size_t>(core), &cores);
  }

  // The worker gets its own session: Ctrl-C reaches only the launcher, which forwards it, and rank
  // 0 may still read from the terminal, since job control stops only readers of the terminal's own
  // session.
  [[noreturn]] void run(pid_t supervisor, int32_t number, int report,
                        const sigset_t& signals) const {
    ::setsid();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != supervisor) ::_exit(127);  // it died before the line above
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGXFSZ, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &signals, nullptr);
    ::setrlimit(RLIMIT_NOFILE, &worker.open_files);
    if (!worker.cores.empty()) ::sched_setaffinity(0, sizeof(cores), &cores);
    if (!worker.reads_input) ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    ::dup2(worker.output, STDOUT_FILENO);
    ::dup2(worker.errors, STDERR_FILENO);
    ::execve(worker.path.c_str(), argv.data(), envp.data());
    const std::array<int32_t, 2> failure = {number, errno};
    [[maybe_unused]] const ssize_t written = ::write(report, failure.data(), sizeof(failure));
    ::_exit(127);
  }
};

void close_inherited(int kept) {
  std::vector<int> inherited;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    inherited.push_back(std::stoi(entry.path().filename().string()));
  }
  for (const int fd : inherited) {
    if (fd > STDERR_FILENO && fd != kept) ::close(fd);
  }
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    ::dup2(nothing, standard);
  }
  ::close(nothing);
}

void send_message(int link, SupervisorMessage::Kind kind, int32_t worker, int64_t value) {
  const SupervisorMessage message{kind, worker, value, monotonic_ns()};
  ::send(link, &message, sizeof(message), MSG_NOSIGNAL);
}

void remove_leftovers(const Leftovers& leftovers) {
  std::error_code ignored;
  for (const auto& file : leftovers.files) std::filesystem::remove(file, ignored);
  for (const auto& folder : leftovers.folders) std::filesystem::remove_all(folder, ignored);
}

class Supervisor {
 public:
  Supervisor(const std::vector<WorkerStart>& workers, const Leftovers& leftovers, int link)
      : workers_(workers), leftovers_(leftovers), link_(link) {}

  [[noreturn]] void run(const sigset_t& worker_signals) {
    ::setsid();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::prctl(PR_SET_NAME, "lockstep-superv");
    send(SupervisorMessage::Kind::kSupervisor, -1, ::getpid());
    start(worker_signals);
    watch();
  }

 private:
  void send(SupervisorMessage::Kind kind, int32_t worker, int64_t value) const {
    send_message(link_, kind, worker, value);
  }

  // Starts all ranks before it waits for any; the end of the report pipe says that all run.
  void start(const sigset_t& worker_signals) {
    std::vector<ExecPlan> plans;
    plans.reserve(workers_.size());
    for (const auto& worker : workers_) plans.emplace_back(worker);
    std::array<int, 2> report{};
    if (::pipe2(report.data(), O_CLOEXEC) != 0) give_up(0, errno);
    const pid_t self = ::getpid();
    for (size_t number = 0; number < plans.size(); ++number) {
      const auto worker = static_cast<int32_t>(number);
      const pid_t pid = ::fork();
      if (pid == 0) plans[number].run(self, worker, report[1], worker_signals);
      if (pid < 0) give_up(worker, errno);
      pids_.push_back(pid);
    }
    ::close(report[1]);
    std::array<int32_t, 2> failure{};
    if (::read(report[0], failure.data(), sizeof(failure)) == sizeof(failure)) {
      give_up(failure[0], failure[1]);
    }
    ::close(report[0]);
    close_inherited(link_);  // a pipe's write end that stays open here would keep the pipe open
    for (size_t number = 0; number < pids_.size(); ++number) {
      send(SupervisorMessage::Kind::kStarted, static_cast<int32_t>(number), pids_[number]);
    }
  }

  [[noreturn]] void give_up(int32_t worker, int reason) const {
    sweep_children(monotonic_ns() + kSweepNs);
    send(SupervisorMessage::Kind::kNotStarted, worker, reason);
    ::_exit(0);
  }

  // epoll reports events in the order in which they happened; poll does not. Before Linux 5.3 there
  // are no process descriptors, and the ranks are polled one by one.
  [[noreturn]] void watch() {
    const int events = ::epoll_create1(EPOLL_CLOEXEC);
    const auto add = [events](int fd, int32_t number) {
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.fd = number;
      return fd >= 0 && ::epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) == 0;
    };
    add(link_, kLink);
    bool all_watched = true;
    for (size_t number = 0; number < pids_.size(); ++number) {
      endings_.push_back(static_cast<int>(::syscall(SYS_pidfd_open, pids_[number], 0)));
      all_watched = add(endings_.back(), static_cast<int32_t>(number)) && all_watched;
    }
    ended_.resize(pids_.size(), false);
    for (;;) {
      std::array<epoll_event, 16> ready{};
      const int count = ::epoll_wait(events, ready.data(), static_cast<int>(ready.size()),
                                     all_watched ? kReapOrphansMs : kAskMs);
      for (int i = 0; i < count; ++i) {
        const int32_t number = ready[static_cast<size_t>(i)].data.fd;
        if (number == kLink) finish();
        report_end(static_cast<size_t>(number));
      }
      for (size_t number = 0; !all_watched && number < pids_.size(); ++number) report_end(number);
      reap_orphans();
    }
  }

  // Leaves the zombie until the sweep: until then no other process can get its number, which is
  // also its group's.
  void report_end(size_t number) {
    siginfo_t info{};
    if (ended_[number] ||
        ::waitid(P_PID, static_cast<id_t>(pids_[number]), &info, WEXITED | WNOHANG | WNOWAIT) !=
            0 ||
        info.si_pid == 0) {
      return;
    }
    const bool by_signal = info.si_code != CLD_EXITED;
    const int status = by_signal ? info.si_status : info.si_status << 8;  // as wait() codes it
    send(SupervisorMessage::Kind::kEnded, static_cast<int32_t>(number), status);
    ended_[number] = true;
    if (endings_[number] >= 0) ::close(endings_[number]);
  }

  // Descendants that a rank abandoned become zombies of this process when they end.
  void reap_orphans() const {
    for (const pid_t child : list_children()) {
      bool is_rank = false;
      for (const pid_t pid : pids_) is_rank = is_rank || pid == child;
      if (!is_rank) ::waitpid(child, nullptr, WNOHANG);
    }
  }

  // A byte came, or the link was closed.
  [[noreturn]] void finish() {
    char asked = 0;
    const bool launcher_is_gone = ::recv(link_, &asked, 1, 0) != 1;
    for (const pid_t pid : pids_) ::kill(-pid, SIGKILL);
    const int alive = sweep_children(monotonic_ns() + kSweepNs);
    if (launcher_is_gone) remove_leftovers(leftovers_);
    send(SupervisorMessage::Kind::kSwept, -1, alive);
    ::_exit(0);
  }

  const std::vector<WorkerStart>& workers_;
  const Leftovers& leftovers_;
  const int link_;
  std::vector<pid_t> pids_;   // [worker]
  std::vector<int> endings_;  // [worker] pidfd
  std::vector<bool> ended_;   // [worker]
};

// `link` is one end of a SOCK_SEQPACKET pair: a byte in it asks for the sweep, its end means that
// the launcher is gone. The guard starts the supervisor, and when that has ended, ends whatever is
// left. Its name does not contain "lockstep", so that `pkill -9 lockstep` leaves somebody to clean
// up.
[[noreturn]] void run_guard(const std::vector<WorkerStart>& workers, const Leftovers& leftovers,
                            int link, const sigset_t& worker_signals) {
  const pid_t launcher = ::getppid();
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  const pid_t supervisor = ::fork();
  if (supervisor == 0) Supervisor(workers, leftovers, link).run(worker_signals);
  if (supervisor < 0) {
    send_message(link, SupervisorMessage::Kind::kNotStarted, 0, errno);
    ::_exit(1);
  }
  ::prctl(PR_SET_NAME, "rank-guard");
  close_inherited(-1);
  while (::waitpid(supervisor, nullptr, 0) < 0 && errno == EINTR) {
  }
  sweep_children(monotonic_ns() + kSweepNs);
  if (::getppid() != launcher) remove_leftovers(leftovers);
  ::_exit(0);
}

void close_write_ends(const std::vector<WorkerStart>& workers) {
  for (const auto& worker : workers) {
    ::close(worker.output);
    ::close(worker.errors);
  }
}

[[noreturn]] void fail_start(const WorkerStart& worker, int reason, int files_needed) {
  std::string help = "check whether this machine is out of memory or processes (ulimit -u)";
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

// A supervisor that is stopped now must not hold up the launcher, which takes no signal here.
void WorkerGroup::wait_until_started(const std::vector<WorkerStart>& workers) {
  while (pids_.size() < workers.size()) {
    const auto message = receive(kStartLookMs);
    if (!message && !lost_) {
      ::kill(guard_, SIGCONT);
      if (supervisor_ > 0) ::kill(supervisor_, SIGCONT);
      continue;
    }
    if (!message) {
      throw Error(Code::kLaunch, "the process that starts the ranks was killed",
                  "start the job again; nothing is left of it");
    }
    if (message->kind == SupervisorMessage::Kind::kNotStarted) {
      fail_start(workers[static_cast<size_t>(message->worker)], static_cast<int>(message->value),
                 files_for_ranks(static_cast<int>(workers.size())));
    }
    if (message->kind == SupervisorMessage::Kind::kSupervisor) {
      supervisor_ = static_cast<pid_t>(message->value);
    } else {
      pids_.push_back(static_cast<pid_t>(message->value));
    }
  }
}

WorkerGroup::~WorkerGroup() {
  sweep();
  ::close(link_);
}

std::optional<SupervisorMessage> WorkerGroup::receive(int timeout_ms) {
  pollfd readable{link_, POLLIN, 0};
  while (timeout_ms != 0 && ::poll(&readable, 1, timeout_ms) < 0 && errno == EINTR) {
  }
  SupervisorMessage message;
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
  if (!message || message->kind != SupervisorMessage::Kind::kEnded) return std::nullopt;
  return WorkerEnd{message->worker, static_cast<int>(message->value), message->at_ns};
}

pid_t WorkerGroup::pid(int worker) const {
  return pids_.at(static_cast<size_t>(worker));
}

void WorkerGroup::signal_all(int signal) const {
  if (lost_ || swept_) return;  // their numbers may belong to other processes by now
  for (const pid_t pid : pids_) {
    ::kill(-pid, signal);
    if (signal != SIGKILL) ::kill(-pid, SIGCONT);
  }
  ::kill(supervisor_, SIGCONT);
}

void WorkerGroup::signal_one(int worker, int signal) const {
  if (!lost_ && !swept_) ::kill(pid(worker), signal);
}

// The supervisor or the guard may be stopped, or held by a debugger. Neither may keep the launcher
// from ending: what they do not do in time is done without them.
void WorkerGroup::sweep() {
  if (swept_) return;
  const bool by_supervisor = !lost_ && sweep_by_supervisor();
  if (!by_supervisor && !lost_) ::kill(supervisor_, SIGKILL);
  swept_ = true;
  ::kill(guard_, SIGCONT);
  const bool by_guard = guard_ends(running_ns() + kSupervisorNs);
  if (!by_guard) ::kill(guard_, SIGKILL);
  if (!by_supervisor || !by_guard) sweep_children(monotonic_ns() + kSweepNs);
  if (!by_guard) ::waitpid(guard_, nullptr, 0);
}

bool WorkerGroup::sweep_by_supervisor() {
  ::kill(supervisor_, SIGCONT);
  const char ask = 1;
  if (::send(link_, &ask, 1, MSG_NOSIGNAL) != 1) return false;
  const int64_t deadline_ns = running_ns() + kSupervisorNs;
  while (running_ns() < deadline_ns && !lost_) {
    const auto message = receive(100);
    if (message && message->kind == SupervisorMessage::Kind::kSwept) return true;
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
