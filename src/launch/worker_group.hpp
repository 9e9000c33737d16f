#pragma once

#include <signal.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "launch/keeper.hpp"

namespace lockstep {

/// The exit code of a rank that stopped because it was asked to: no failure, and no success.
inline constexpr int kPreemptedExit = 75;

/// How one rank ended.
struct WorkerEnd {
  int worker = 0;     ///< local rank
  int status = 0;     ///< as waitpid gives it
  int64_t at_ns = 0;  ///< when the kernel said so
  bool bad() const { return status != 0 && exit_code() != kPreemptedExit; }
  int exit_code() const;  ///< 128 + signal where a signal ended it
  int signal() const;     ///< 0 where none did
};

/// The running ranks of this host. Destroyed, it leaves none of them and none of their descendants.
class WorkerGroup {
 public:
  /// Starts all of them; where one cannot be started, none is left and an Error (kLaunch) says why.
  /// The write ends in `workers` are closed. `worker_signals` is the signal mask they get.
  WorkerGroup(std::vector<WorkerStart> workers, const Leftovers& leftovers,
              const sigset_t& worker_signals);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  int descriptor() const { return link_; }  ///< readable when take_end() has something
  std::optional<WorkerEnd> take_end();      ///< in the order of the kernel; never waits
  bool lost() const { return lost_; }       ///< the keeper was killed, and all ranks with it
  pid_t pid(int worker) const;
  int size() const { return static_cast<int>(pids_.size()); }

  /// To every rank and what it started in its own group, stopped ones included. A keeper that was
  /// stopped goes on, too: it has to tell of the ends.
  void signal_all(int signal) const;

  /// To this rank's process alone.
  void signal_one(int worker, int signal) const;

  /// Ends everything that is still alive below this process.
  void sweep();

 private:
  std::optional<KeeperMessage> receive(int timeout_ms);
  bool sweep_by_keeper();
  bool guard_ends(int64_t deadline_ns) const;
  void wait_until_started(const std::vector<WorkerStart>& workers);

  pid_t guard_ = -1;   // child of this process
  pid_t keeper_ = -1;  // child of the guard
  int link_ = -1;
  bool lost_ = false;
  bool swept_ = false;
  std::vector<pid_t> pids_;  // [worker]
};

}  // namespace lockstep
