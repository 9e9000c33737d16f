#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Note [Keeper]: the ranks of a host are children of a keeper, a small process that adopts every
// orphan below it (PR_SET_CHILD_SUBREAPER). Between launcher and keeper stands a guard, which only
// waits for the keeper's end. Whatever ends, somebody who can find all descendants is left: the
// launcher dies, and the keeper, whose link closes, kills its children until none is left; the
// keeper dies, and the kernel kills the ranks (PR_SET_PDEATHSIG) and gives their descendants to the
// guard, which kills them; launcher and keeper die (`pkill -9 lockstep`), and the guard still does;
// the guard dies, and the launcher, a subreaper too, takes its place. A sweep by process group
// alone would miss what a rank started with setsid.

/// One process to start. Made before the fork: between fork and exec nothing may allocate.
struct WorkerStart {
  std::string path;
  std::vector<std::string> arguments;    ///< argv, [0] included
  std::vector<std::string> environment;  ///< "NAME=value"
  std::vector<int> cores;                ///< empty: any
  bool reads_input = false;              ///< has the launcher's standard input; else /dev/null
  int output = -1;                       ///< write ends of its pipes
  int errors = -1;
};

/// From the keeper to the launcher, in the order the kernel saw the events.
struct KeeperMessage {
  enum class Kind : int32_t {
    kKeeper,      ///< the first one. value: the keeper's process id
    kStarted,     ///< value: process id
    kNotStarted,  ///< value: errno; nothing is left running
    kEnded,       ///< value: wait status
    kSwept        ///< the last one. value: processes that were still alive
  };
  Kind kind = Kind::kSwept;
  int32_t worker = -1;
  int64_t value = 0;
  int64_t at_ns = 0;
};

/// What the keeper removes when the launcher was killed and cannot.
struct Leftovers {
  std::vector<std::string> files;
  std::vector<std::string> folders;
};

/// The guard's life: it starts the keeper, and when that has ended, ends whatever is left. The
/// arguments are the keeper's. Never returns.
[[noreturn]] void run_guard(const std::vector<WorkerStart>& workers, const Leftovers& leftovers,
                            int link, const sigset_t& worker_signals);

/// The keeper's life. `link` is a SOCK_SEQPACKET pair's end: a byte in it asks for the sweep, its
/// end means that the launcher is gone. Never returns.
[[noreturn]] void run_keeper(const std::vector<WorkerStart>& workers, const Leftovers& leftovers,
                             int link, const sigset_t& worker_signals);

}  // namespace lockstep
