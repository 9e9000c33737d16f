#pragma once

#include <signal.h>

#include <string_view>
#include <vector>

namespace lockstep {

/// A signal that the launcher can handle. SIGTERM, SIGINT, SIGHUP and SIGQUIT ask the ranks to end;
/// all others are only passed on to them, and the job goes on. An example of the latter is SLURM's
/// `--signal=USR1@60`, on which ranks save a checkpoint.
struct SignalInfo {
  int number;
  std::string_view name;  ///< "SIGUSR1"
  bool stops;             ///< asks the ranks to end
  bool by_default;        ///< handled unless --signals-to-handle says otherwise
};
const std::vector<SignalInfo>& known_signals();
const SignalInfo& signal_info(int number);

/// Turns signals into events. Signals that are passed on are blocked from the start, so that none
/// can kill the launcher. Signals that stop the ranks are blocked only while ranks run: before that
/// they end the launcher like any program. A SIGHUP that was ignored before (nohup) stays ignored.
class SignalWatch {
 public:
  explicit SignalWatch(const std::vector<int>& signals);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// Held while ranks run. Earlier signals that were to be passed on are dropped, since there was
  /// nobody to receive them.
  class WhileRanksRun {
   public:
    explicit WhileRanksRun(const SignalWatch& watch);
    ~WhileRanksRun();
    WhileRanksRun(const WhileRanksRun&) = delete;
    WhileRanksRun& operator=(const WhileRanksRun&) = delete;

   private:
    const SignalWatch& watch_;
  };

  int descriptor() const { return descriptor_; }  ///< readable when a signal is pending
  int take() const;                               ///< the next pending signal, or 0

  /// The signal mask from before, which the ranks get.
  const sigset_t& mask_before() const { return before_; }

 private:
  int descriptor_;
  sigset_t before_;
  sigset_t stopping_;
};

}  // namespace lockstep
