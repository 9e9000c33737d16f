#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/console.hpp"
#include "launch/oom_watch.hpp"
#include "launch/output.hpp"
#include "launch/plan.hpp"
#include "launch/rendezvous.hpp"
#include "launch/signal_watch.hpp"
#include "launch/verdict.hpp"
#include "launch/worker_environment.hpp"
#include "launch/worker_group.hpp"
#include "lockstep/board.hpp"

namespace lockstep {

/// How one round of all ranks ended.
struct RoundResult {
  enum class Kind { kSucceeded, kPreempted, kFailed, kInterrupted } kind = Kind::kSucceeded;
  int exit_code = 0;
  std::string line;              ///< kFailed: what happened, in one line
  std::optional<Error> failure;  ///< kFailed: the block to print
  bool host_lost = false;        ///< kFailed: not a rank but a whole host; no restart helps
  bool permanent = false;        ///< kFailed: the ranks would end the same way again
};

/// What a round needs; all of it outlives the round.
struct RoundContext {
  const LaunchPlan& plan;
  const std::string& program;  ///< path
  const RoundEnvironment& environment;
  const Board& board;
  const Leftovers& leftovers;
  const SignalWatch& signals;
  Console& console;
  NodeLink* link;  ///< to the launchers of other hosts; nullptr: one host
};

/// Starts the ranks of this host and watches them until all have ended, by themselves or because
/// one failed, a signal came, or another host said so. One thread: the caller's.
class Round {
 public:
  explicit Round(const RoundContext& context);
  RoundResult run();

 private:
  // kRunning -> kSettling (a rank ended badly) -> kStopping (SIGTERM sent) -> kKilling -> kDone;
  // kRunning -> kStopping on a signal or at another host's word;
  // kRunning -> kWaitingForHosts -> kDone where all went well;
  // kListening, before kDone, where another host is to tell what its rank did.
  enum class State {
    kRunning,
    kWaitingForHosts,
    kSettling,
    kStopping,
    kKilling,
    kListening,
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
  void report_verdict();
  void look_for_early_leaver();
  void judge_if_accused();
  void finish_stopping(int64_t now_ns);
  void stop(int signal);
  void kill();
  bool all_ended() const { return order_ == group_.size(); }
  std::vector<RankView> look_at_ranks() const;
  RoundResult result();
  RoundResult failed();
  int rank_of(int worker) const { return context_.environment.layout.first_rank() + worker; }

  const RoundContext context_;
  const OomWatch oom_;
  OutputRouter output_;
  WorkerGroup group_;
  State state_ = State::kRunning;
  int64_t deadline_ns_ = 0;  // of kStopping, kKilling and kListening; see Note [Running clock]
  int64_t settling_since_ns_ = 0;
  std::vector<std::optional<WorkerEnd>> ends_;  // [worker]
  std::vector<int> orders_;                     // [worker] place among the ends
  int order_ = 0;                               // ends so far
  bool any_bad_ = false;
  bool look_for_waiting_ = false;  // a rank ended well that others may come to miss
  int interrupted_by_ = 0;
  std::optional<Verdict> verdict_;
  std::vector<RankView> views_;  // when the verdict was given
  std::optional<RemoteFailure> remote_;
};

}  // namespace lockstep
