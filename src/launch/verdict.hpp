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
  kExit,          ///< ended with an exit code
  kSignal,        ///< ended by a signal
  kOutOfMemory,   ///< ended by the system's SIGKILL, for lack of memory
  kHalted,        ///< alive, stopped by SIGSTOP
  kMissing,       ///< alive, did not come to a collective
  kLate,          ///< was elsewhere while others waited for it; it has ended since
  kLeft,          ///< ended well while others needed it
  kDisagreement,  ///< ranks made different calls, or wait for each other: nobody can tell who is
                  ///< wrong
  kRemote         ///< a rank of another host
};

/// Who is to blame and who suffered.
struct Verdict {
  Cause cause = Cause::kExit;
  int root = -1;  ///< rank of the world at fault; kDisagreement: the first of those that disagree
  int witness = -1;  ///< the first of this host to end badly; the root itself, or its victim
  bool before_rendezvous = false;  ///< the ranks had not met yet
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

/// The verdict where another host says that a rank of this host is at fault.
Verdict judge_accused(const std::vector<RankView>& views, int root, bool out_of_memory);

/// Whether a rank has ended well without coming to the rendezvous that others may still begin.
bool may_have_left_early(const std::vector<RankView>& views);

/// The verdict where it has, and others wait there for it: nobody has ended badly, but nobody ever
/// will end well.
std::optional<Verdict> judge_early_leaver(const std::vector<RankView>& views);

/// What a moment's patience may tell.
enum class Patience {
  kNone,
  kForLivingCulprit,  ///< the rank that is blamed has not ended yet
  kForEndingCulprit   ///< the rank that is blamed has given up, and is about to end
};
Patience patience_with(const std::vector<RankView>& views);

}  // namespace lockstep
