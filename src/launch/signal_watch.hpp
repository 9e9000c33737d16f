#pragma once

#include <signal.h>

#include <string_view>
#include <vector>

namespace lockstep {

/// Signals that the launcher can handle: SIGTERM, SIGINT, SIGHUP and SIGQUIT ask the ranks to end,
/// all others are only passed on to them, and the job goes on. SLURM's `--signal=USR1@60` is of the
/// second kind: ranks save a checkpoint when they get it.
struct SignalInfo {
  int number;
  std::string_view name;  ///< "SIGUSR1"
  bool stops;             ///< asks the ranks to end
  bool by_default;        ///< handled unless --signals-to-handle says otherwise
};
const std::vector<SignalInfo>& known_signals();
const SignalInfo& signal_info(int number);

/// Turns signals into events. Those that are only passed on wait from the start of the launcher, so
/// that none can kill it; those that stop, only while ranks run: before that they end the launcher
/// as they end any program. A SIGHUP that was ignored before (nohup) stays ignored.
class SignalWatch {
 public:
  explicit SignalWatch(const std::vector<int>& signals);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// While it lives, ranks run. Signals from before that were to be passed on are forgotten: nobody
  /// was there to get them.
  class WhileRanksRun {
   public:
    explicit WhileRanksRun(const SignalWatch& watch);
    ~WhileRanksRun();
    WhileRanksRun(const WhileRanksRun&) = delete;
    WhileRanksRun& operator=(const WhileRanksRun&) = delete;

   private:
    const SignalWatch& watch_;
  };

  int descriptor() const { return descriptor_; }  ///< readable when a signal waits
  int take() const;                               ///< the waiting signal, or 0

  /// The mask before, which the ranks get.
  const sigset_t& mask_before() const { return before_; }

 private:
  int descriptor_;
  sigset_t before_;
  sigset_t stopping_;
};

}  // namespace lockstep
