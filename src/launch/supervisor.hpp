#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// Note [Supervisor]: the ranks of a host are children of a supervisor, a small process that adopts
// every orphan below it (PR_SET_CHILD_SUBREAPER). Between the launcher and the supervisor is a
// guard, which only waits for the supervisor to end. Whichever process dies, one is left that can
// find all descendants:
// - the launcher dies: the supervisor sees its link close, and kills its children until none is
//   left;
// - the supervisor dies: the kernel kills the ranks (PR_SET_PDEATHSIG) and gives their descendants
//   to the guard, which kills them;
// - the launcher and the supervisor die (`pkill -9 lockstep`): the guard still does;
// - the guard dies: the launcher, also a subreaper, takes its role.
// Killing by process group alone would miss what a rank started with setsid.

/// One process to start. It is prepared before the fork: between fork and exec nothing may
/// allocate.
struct WorkerStart {
  std::string path;
  std::vector<std::string> arguments;    ///< argv, including [0]
  std::vector<std::string> environment;  ///< "NAME=value"
  std::vector<int> cores;                ///< empty: any
  bool reads_input = false;              ///< gets the launcher's standard input, else /dev/null
  int output = -1;                       ///< write ends of its pipes
  int errors = -1;
  rlimit open_files{};  ///< its limit of open files
};

/// What the supervisor removes if the launcher was killed and cannot.
struct Leftovers {
  std::vector<std::string> files;
  std::vector<std::string> folders;
};

/// The exit code of a rank that stopped because it was asked to: neither a failure nor a success.
inline constexpr int kPreemptedExit = 75;

/// How one rank ended.
struct WorkerEnd {
  int worker = 0;     ///< local rank
  int status = 0;     ///< as waitpid reports it
  int64_t at_ns = 0;  ///< when the kernel reported it
  bool bad() const { return status != 0 && exit_code() != kPreemptedExit; }
  int exit_code() const;  ///< 128 + signal if a signal ended it
  int signal() const;     ///< 0 if none did
};

struct SupervisorMessage;

/// The running ranks of this host. Its destructor leaves none of them and none of their
/// descendants.
class WorkerGroup {
 public:
  /// Starts all workers. If one cannot be started, none is left and an Error (kLaunch) says why.
  /// Closes the write ends in `workers`. `worker_signals` is the signal mask the workers get.
  WorkerGroup(std::vector<WorkerStart> workers, const Leftovers& leftovers,
              const sigset_t& worker_signals);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  int descriptor() const { return link_; }  ///< readable when take_end() has something
  std::optional<WorkerEnd> take_end();      ///< in the kernel's order; never blocks
  bool lost() const { return lost_; }       ///< the supervisor was killed, and all ranks with it
  pid_t pid(int worker) const;
  int size() const { return static_cast<int>(pids_.size()); }

  /// Signals the process group of every rank, and continues those that are stopped; also a stopped
  /// supervisor, since it has to report the ends.
  void signal_all(int signal) const;

  /// Signals this rank's process only.
  void signal_one(int worker, int signal) const;

  /// Ends everything that is still alive below this process.
  void sweep();

 private:
  std::optional<SupervisorMessage> receive(int timeout_ms);
  bool sweep_by_supervisor();
  bool guard_ends(int64_t deadline_ns) const;
  void wait_until_started(const std::vector<WorkerStart>& workers);

  pid_t guard_ = -1;       // child of this process
  pid_t supervisor_ = -1;  // child of the guard
  int link_ = -1;
  bool lost_ = false;
  bool swept_ = false;
  std::vector<pid_t> pids_;  // [worker]
};

}  // namespace lockstep
