#pragma once

#include <optional>
#include <vector>

#include "launch/worker_group.hpp"
#include "lockstep/board.hpp"

namespace lockstep {

/// What is known about one rank of this host when the run fails.
struct RankView {
  int rank = 0;  ///< of the world
  pid_t pid = 0;
  std::optional<WorkerEnd> end;
  int order = -1;    ///< place among the ends; -1: alive
  char state = ' ';  ///< of a living process, as in /proc: 'R', 'S', 'D', 'T'
  RankStatus board;
};

enum class Cause {
  kExit,         ///< ended with an exit code
  kSignal,       ///< ended by a signal
  kOutOfMemory,  ///< ended by the system's SIGKILL, for lack of memory
  kHalted,       ///< alive, stopped by SIGSTOP
  kMissing,      ///< alive, did not come to a collective
  kLeft,         ///< ended well while others needed it
  kRemote        ///< a rank of another host
};

/// Who is to blame and who suffered.
struct Verdict {
  Cause cause = Cause::kExit;
  int root = -1;     ///< rank of the world at fault
  int witness = -1;  ///< the first of this host to end badly; the root itself, or its victim
  int exit_code = 1;
  std::vector<int> gave_up;  ///< ranks that ended badly by themselves, the root excluded
  std::vector<int> running;  ///< ranks that were still alive, the root excluded: to be stopped
};

/// Blames the first rank that ended badly, unless its own error blames another: then that one, and
/// so on. `views` is [local rank]; at least one has ended badly.
Verdict judge(const std::vector<RankView>& views, bool out_of_memory);

/// Whether a restart may help. It cannot where the program itself, its flags or its files are at
/// fault: it would end the same way again.
bool may_change(const Verdict& verdict, const std::vector<RankView>& views);

/// Whether the first bad end is its own explanation: SIGKILL, or a fault of the rank's own code.
/// Not SIGABRT: a program may end so because another rank has failed.
bool first_was_killed(const std::vector<RankView>& views);

/// Whether a moment's patience may tell more: the rank that is blamed has not ended yet.
bool blames_a_living_rank(const std::vector<RankView>& views);

}  // namespace lockstep
