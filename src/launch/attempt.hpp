#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/oom_watch.hpp"
#include "launch/output.hpp"
#include "launch/plan.hpp"
#include "launch/progress.hpp"
#include "launch/root_cause.hpp"
#include "launch/signals.hpp"
#include "launch/supervisor.hpp"
#include "launch/worker_environment.hpp"
#include "lockstep/detail/board.hpp"

namespace lockstep {

/// How one attempt ended.
struct AttemptResult {
  enum class Kind { kSucceeded, kPreempted, kFailed, kInterrupted } kind = Kind::kSucceeded;
  int exit_code = 0;
  std::string line;                     ///< kFailed: what happened, in one line
  std::optional<Error> failure;         ///< kFailed: the block to print
  Restart restart = Restart::kMayHelp;  ///< kFailed
};

/// What an attempt needs; all of it outlives the attempt.
struct AttemptContext {
  const LaunchPlan& plan;
  const std::string& program;  ///< path
  const AttemptEnvironment& environment;
  const Board& board;
  const Leftovers& leftovers;
  const SignalWatch& signals;
  Console& console;
  const rlimit& open_files;  ///< of the ranks
  NodeLink* link;            ///< to the launchers of other hosts; nullptr if there is one host
};

/// One attempt to run all ranks: starts those of this host and watches them until all have ended,
/// by themselves or because one failed, a signal came, or another host failed. Runs on the caller's
/// thread.
class Attempt {
 public:
  explicit Attempt(const AttemptContext& context);
  AttemptResult run();

 private:
  // kRunning -> kSettling (a rank ended badly) -> kStopping (SIGTERM sent) -> kKilling -> kDone;
  // kRunning -> kStopping on a signal, or if another host failed;
  // kRunning -> kWaitingForHosts -> kDone if all went well;
  // kListening comes before kDone if another host is to tell what its rank did, and kReporting
  // after that if it did not: then this host accuses that rank, and node 0 answers with the job's
  // first failure, which may be the loss of that host.
  enum class State {
    kRunning,
    kWaitingForHosts,
    kSettling,
    kStopping,
    kKilling,
    kListening,
    kReporting,
    kDone
  };

  std::vector<WorkerStart> make_starts();
  void wait();
  int wait_ms() const;
  void take_ends();
  void take_signals();
  void pass_on(int signal);
  void take_node_events();
  void advance(int64_t now_ns);
  void decide();
  void report_root_cause();
  void look_for_early_leaver();
  void report_early_leaver();
  void look_at_progress(int64_t now_ns);
  void ask_for_stacks() const;
  void judge_if_accused();
  void finish_stopping(int64_t now_ns);
  double grace_s() const;
  void stop(int signal);
  void kill();
  bool all_ended() const { return order_ == group_.size(); }
  bool other_host_was_asked_to_stop() const {
    return remote_ && remote_->rank < 0 && remote_->restart == Restart::kImpossible;
  }
  std::vector<RankView> look_at_ranks() const;
  AttemptResult result();
  AttemptResult failed();
  int rank_of(int worker) const { return context_.environment.layout.first_rank() + worker; }

  const AttemptContext context_;
  const OomWatch oom_;
  OutputRouter output_;
  WorkerGroup group_;
  State state_ = State::kRunning;
  int64_t deadline_ns_ = 0;  // of kStopping, kKilling and kListening; see Note [Running clock]
  int64_t settling_since_ns_ = 0;
  std::vector<std::optional<WorkerEnd>> ends_;  // [worker]
  std::vector<int> orders_;                     // [worker] position among the ends
  int order_ = 0;                               // ends so far
  bool any_bad_ = false;
  bool look_for_waiting_ = false;      // a rank ended well that others may come to miss
  bool left_reported_ = false;         // the first such rank of this host, to the other hosts
  std::optional<int> left_elsewhere_;  // the first such rank of another host
  int interrupted_by_ = 0;
  std::optional<RootCause> root_cause_;
  std::vector<RankView> views_;  // when the root cause was found
  std::optional<RemoteFailure> remote_;
  bool report_taken_ = false;  // by node 0: the job's first failure is the one of this host
  StragglerWatch stragglers_;
  std::optional<StallWatch> stalls_;
  int64_t next_look_ns_ = 0;  // for stragglers and stalls
};

}  // namespace lockstep
