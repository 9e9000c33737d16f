#include "launch/keeper.hpp"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>

#include "launch/sweep.hpp"
#include "lockstep/clock.hpp"

namespace lockstep {
namespace {

constexpr int64_t kSweepNs = 10'000'000'000;
constexpr int kReapOrphansMs = 2000;
constexpr int kAskMs = 5;
constexpr int32_t kLink = -1;  // the link's number among the workers' in epoll

// The C view of a WorkerStart.
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

  // A session of its own: Ctrl-C reaches the launcher alone, which forwards it, and yet rank 0 may
  // read from the terminal, since job control stops only readers of the terminal's own session.
  [[noreturn]] void run(pid_t keeper, int32_t number, int report, const sigset_t& signals) const {
    ::setsid();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != keeper) ::_exit(127);  // it died before the line above
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGXFSZ, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &signals, nullptr);
    if (!worker.cores.empty()) ::sched_setaffinity(0, sizeof(cores), &cores);
    if (!worker.reads_input) ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    ::dup2(worker.output, STDOUT_FILENO);
    ::dup2(worker.errors, STDERR_FILENO);
    ::execve(worker.path.c_str(), argv.data(), envp.data());
    const std::array<int32_t, 2> failure = {number, errno};
    [[maybe_unused]] const ssize_t told = ::write(report, failure.data(), sizeof(failure));
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

void send_message(int link, KeeperMessage::Kind kind, int32_t worker, int64_t value) {
  const KeeperMessage message{kind, worker, value, monotonic_ns()};
  ::send(link, &message, sizeof(message), MSG_NOSIGNAL);
}

void remove_leftovers(const Leftovers& leftovers) {
  std::error_code ignored;
  for (const auto& file : leftovers.files) std::filesystem::remove(file, ignored);
  for (const auto& folder : leftovers.folders) std::filesystem::remove_all(folder, ignored);
}

class Keeper {
 public:
  Keeper(const std::vector<WorkerStart>& workers, const Leftovers& leftovers, int link)
      : workers_(workers), leftovers_(leftovers), link_(link) {}

  [[noreturn]] void run(const sigset_t& worker_signals) {
    ::setsid();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::prctl(PR_SET_NAME, "lockstep-keeper");
    send(KeeperMessage::Kind::kKeeper, -1, ::getpid());
    start(worker_signals);
    watch();
  }

 private:
  void send(KeeperMessage::Kind kind, int32_t worker, int64_t value) const {
    send_message(link_, kind, worker, value);
  }

  // All ranks are started before anyone is waited for; the report's end says that all run.
  void start(const sigset_t& worker_signals) {
    std::vector<ExecPlan> plans;
    plans.reserve(workers_.size());
    for (const auto& worker : workers_) plans.emplace_back(worker);
    std::array<int, 2> report{};
    if (::pipe2(report.data(), O_CLOEXEC) != 0) give_up(0, errno);
    const pid_t self = ::getpid();
    for (size_t number = 0; number < plans.size(); ++number) {
      const auto place = static_cast<int32_t>(number);
      const pid_t pid = ::fork();
      if (pid == 0) plans[number].run(self, place, report[1], worker_signals);
      if (pid < 0) give_up(place, errno);
      pids_.push_back(pid);
    }
    ::close(report[1]);
    std::array<int32_t, 2> failure{};
    if (::read(report[0], failure.data(), sizeof(failure)) == sizeof(failure)) {
      give_up(failure[0], failure[1]);
    }
    ::close(report[0]);
    close_inherited(link_);  // a pipe's end that is held here would keep the pipe from ending
    for (size_t number = 0; number < pids_.size(); ++number) {
      send(KeeperMessage::Kind::kStarted, static_cast<int32_t>(number), pids_[number]);
    }
  }

  [[noreturn]] void give_up(int32_t worker, int reason) const {
    sweep_children(monotonic_ns() + kSweepNs);
    send(KeeperMessage::Kind::kNotStarted, worker, reason);
    ::_exit(0);
  }

  // epoll hands out events in the order in which they happened, which poll does not. Before Linux
  // 5.3 there are no descriptors of processes, and ranks are asked one by one, often.
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
        tell_end(static_cast<size_t>(number));
      }
      for (size_t number = 0; !all_watched && number < pids_.size(); ++number) tell_end(number);
      reap_orphans();
    }
  }

  // The zombie stays until the sweep: so long its number, which is its group's, is nobody else's.
  void tell_end(size_t number) {
    siginfo_t info{};
    if (ended_[number] ||
        ::waitid(P_PID, static_cast<id_t>(pids_[number]), &info, WEXITED | WNOHANG | WNOWAIT) !=
            0 ||
        info.si_pid == 0) {
      return;
    }
    const bool by_signal = info.si_code != CLD_EXITED;
    const int status = by_signal ? info.si_status : info.si_status << 8;  // as wait() codes it
    send(KeeperMessage::Kind::kEnded, static_cast<int32_t>(number), status);
    ended_[number] = true;
    if (endings_[number] >= 0) ::close(endings_[number]);
  }

  // Descendants that a rank abandoned become our zombies when they end.
  void reap_orphans() const {
    for (const pid_t child : list_children()) {
      bool is_rank = false;
      for (const pid_t pid : pids_) is_rank = is_rank || pid == child;
      if (!is_rank) ::waitpid(child, nullptr, WNOHANG);
    }
  }

  // A byte came, or the link's end.
  [[noreturn]] void finish() {
    char asked = 0;
    const bool launcher_is_gone = ::recv(link_, &asked, 1, 0) != 1;
    for (const pid_t pid : pids_) ::kill(-pid, SIGKILL);
    const int alive = sweep_children(monotonic_ns() + kSweepNs);
    if (launcher_is_gone) remove_leftovers(leftovers_);
    send(KeeperMessage::Kind::kSwept, -1, alive);
    ::_exit(0);
  }

  const std::vector<WorkerStart>& workers_;
  const Leftovers& leftovers_;
  const int link_;
  std::vector<pid_t> pids_;   // [worker]
  std::vector<int> endings_;  // [worker] pidfd
  std::vector<bool> ended_;   // [worker]
};

}  // namespace

// Its name does not contain "lockstep", so that `pkill -9 lockstep` leaves somebody to clean up.
void run_guard(const std::vector<WorkerStart>& workers, const Leftovers& leftovers, int link,
               const sigset_t& worker_signals) {
  const pid_t launcher = ::getppid();
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  const pid_t keeper = ::fork();
  if (keeper == 0) run_keeper(workers, leftovers, link, worker_signals);
  if (keeper < 0) {
    send_message(link, KeeperMessage::Kind::kNotStarted, 0, errno);
    ::_exit(1);
  }
  ::prctl(PR_SET_NAME, "rank-guard");
  close_inherited(-1);
  while (::waitpid(keeper, nullptr, 0) < 0 && errno == EINTR) {
  }
  sweep_children(monotonic_ns() + kSweepNs);
  if (::getppid() != launcher) remove_leftovers(leftovers);
  ::_exit(0);
}

void run_keeper(const std::vector<WorkerStart>& workers, const Leftovers& leftovers, int link,
                const sigset_t& worker_signals) {
  Keeper(workers, leftovers, link).run(worker_signals);
}

}  // namespace lockstep
