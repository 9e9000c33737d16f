#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/rendezvous.hpp"
#include "launch/supervisor.hpp"
#include "lockstep/detail/board.hpp"
#include "lockstep/error.hpp"

// Which rank is to blame for a failed run, and how that is reported.

namespace lockstep {

/// What is known about one rank of this host when the run fails.
struct RankView {
  int rank = 0;  ///< in the world
  pid_t pid = 0;
  std::optional<WorkerEnd> end;
  int order = -1;    ///< position among the ends; -1 while alive
  char state = ' ';  ///< of a living process, as in /proc: 'R', 'S', 'D', 'T'
  RankStatus board;
};

enum class Cause {
  kExit,          ///< ended with an exit code
  kSignal,        ///< ended by a signal
  kOutOfMemory,   ///< killed by the system because memory ran out
  kHalted,        ///< alive, stopped by SIGSTOP
  kMissing,       ///< alive, did not come to a collective
  kLate,          ///< was elsewhere while others waited for it; it has ended since
  kStalled,       ///< alive, outside of any collective, and made no step for --step-timeout
  kLeft,          ///< ended well while others needed it
  kDisagreement,  ///< ranks made different calls or wait for each other; unknown which is wrong
  kRemote         ///< a rank of another host
};

/// The rank that is to blame, and those that suffered.
struct RootCause {
  Cause cause = Cause::kExit;
  int rank = -1;  ///< at fault, in the world; kDisagreement: the first of those that disagree
  int first_failure = -1;  ///< first rank of this host to end badly: at fault itself, or a victim
  bool before_rendezvous = false;  ///< the rendezvous was not complete
  int exit_code = 1;
  std::vector<int> gave_up;  ///< other ranks that ended badly by themselves
  std::vector<int> running;  ///< other ranks that are still alive and must be stopped
  std::vector<int> stalled;  ///< kStalled: all ranks that made no progress, `rank` among them
  double stalled_s = 0;      ///< kStalled: for so long
};

/// Blames the first rank that ended badly, unless its own error blames another rank: then that one,
/// and so on. `views` is [local rank]; at least one has ended badly.
RootCause find_root_cause(const std::vector<RankView>& views, bool out_of_memory);

/// The root cause if another host says that `rank`, of this host, is at fault.
RootCause find_cause_in_rank(const std::vector<RankView>& views, int rank, bool out_of_memory);

/// The root cause if a rank ended well without coming to the rendezvous, and others wait there for
/// it: no rank has failed, but none will ever finish.
std::optional<RootCause> find_early_leaver(const std::vector<RankView>& views);

/// The root cause if a StallWatch found that no rank makes progress.
RootCause find_stall(const std::vector<RankView>& views, double longest_s);

/// The ranks that have ended well without coming to a rendezvous, which others may still start.
std::vector<int> ranks_that_never_came(const std::vector<RankView>& views);

/// True if a rank waits in the rendezvous of all ranks.
bool somebody_waits_in_rendezvous(const std::vector<RankView>& views);

/// "rank 3 ended with exit code 0 and never came to the rendezvous of all ranks".
std::string never_came_line(int rank);

/// Whether a restart may help. It cannot if the program itself, its flags or its files are at
/// fault.
Restart restart_after(const RootCause& root_cause, const std::vector<RankView>& views);

/// True if the rank at fault says itself that it suffers from another one.
bool is_victim(const RootCause& root_cause, const std::vector<RankView>& views);

/// True if the first bad end explains itself: SIGKILL, or a fault of the rank's own code. Not
/// SIGABRT: a program may end this way because another rank has failed.
bool first_was_killed(const std::vector<RankView>& views);

/// Whether it pays to wait a moment before judging.
enum class Patience {
  kNone,
  kForLivingCulprit,  ///< the blamed rank has not ended yet
  kForEndingCulprit   ///< the blamed rank has given up and is about to end
};
Patience patience_with(const std::vector<RankView>& views);

/// What the failure report needs in addition to the root cause.
struct FailureFacts {
  std::string host;
  std::string program;  ///< as the user wrote it
  int world_size = 1;
  std::string logs;                      ///< folder of this attempt
  std::string error_message;             ///< from the culprit's error file; "" if there is none
  std::vector<std::string> last_errors;  ///< the culprit's last lines that the console did not show
  std::map<int, std::vector<std::string>> stacks;  ///< [rank] functions, innermost first
  std::string bundle;  ///< path of the crash bundle; "" if there is none
  std::string remote;  ///< what another host said about its rank; "" or one line
  int64_t now_ns = 0;
};

/// The block that a failed run ends with: at most 15 lines.
Error failure_error(const RootCause& root_cause, const std::vector<RankView>& views,
                    const FailureFacts& facts);

/// One line for other hosts, and for a run that is about to restart.
std::string failure_line(const RootCause& root_cause, const std::vector<RankView>& views,
                         const FailureFacts& facts);

/// "rank 2", "ranks 0, 1 and 3".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace lockstep
