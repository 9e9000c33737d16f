#pragma once

namespace lockstep {

/// Guard: SIGTERM and SIGUSR1 only ask this process to stop soon. Either of them has its usual
/// effect when it comes again a second or more later, so that a program which does not react can
/// still be ended. Several guards may exist; the last restores the handlers, but not the default
/// action of a signal that came, or that is expected: while the process ends, it may come again.
class PreemptionSignals {
 public:
  PreemptionSignals();
  ~PreemptionSignals();
  PreemptionSignals(const PreemptionSignals&) = delete;
  PreemptionSignals& operator=(const PreemptionSignals&) = delete;

  /// The signal that came while a guard existed; 0 if none did.
  static int received();

  /// Another rank was asked to stop and this process ends with it: its own signal may be on the
  /// way.
  static void expect();
};

}  // namespace lockstep
