#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Injected faults: `lockstep run --inject` causes them in one rank, for tests and lectures.

namespace lockstep {

enum class FaultKind {
  kKill,      ///< SIGKILL
  kStop,      ///< SIGSTOP
  kExit,      ///< ends with an exit code
  kSlow,      ///< sleeps in this step and all later ones
  kNan,       ///< a gradient becomes NaN
  kMismatch,  ///< calls another collective than the other ranks
  kNetcut     ///< loses all its network connections
};

struct Fault {
  FaultKind kind = FaultKind::kKill;
  int rank = 0;
  int64_t step = 1;    ///< from 1
  int64_t amount = 0;  ///< kExit: the code; kSlow: milliseconds

  bool operator==(const Fault&) const = default;
};

/// "kill@rank=1,step=5", several with ';' between them. Anything else is an Error (kUsage).
std::vector<Fault> parse_faults(std::string_view text);
std::string format_faults(const std::vector<Fault>& faults);

/// Provokes the faults of one rank.
class FaultInjector {
 public:
  FaultInjector(const std::vector<Fault>& faults, int rank);

  /// The faults of this process: those in LOCKSTEP_INJECT. A restarted rank has none.
  static FaultInjector& of_process();

  /// The program begins this step. Faults of the process happen now.
  void begin_step(int64_t step);

  /// A synchronised backward begins: the next step of programs that do not count their steps.
  void begin_backward();

  /// Whether this fault is due in the current step. Each is given once.
  bool take(FaultKind kind);

 private:
  void happen();

  std::vector<Fault> faults_;
  int64_t step_ = 0;
  bool counts_steps_ = false;
};

}  // namespace lockstep
