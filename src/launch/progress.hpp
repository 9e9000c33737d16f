#pragma once

// What boards show while ranks run: a rank that is slower than the others, and no progress at all.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/detail/board.hpp"

namespace lockstep {

/// A rank that takes longer for its own part of a step than the others, which wait for it.
struct Straggler {
  int rank = -1;
  double own_ms = 0;  ///< per step: all time but that in which it waited for others
  double ratio = 1;   ///< to the median of the other ranks
};

/// Finds stragglers while a job runs, from what its ranks show on their boards. A rank is named
/// again only if it has become much slower, or has kept up in between.
class StragglerWatch {
 public:
  /// The straggler that is to be named now, if any. `ranks` is [local rank]. Ranks that show no
  /// steps are left out.
  std::optional<Straggler> look(const std::vector<RankStatus>& ranks);

 private:
  struct Reading {
    int64_t steps = 0;
    int64_t own_ns = 0;
    int64_t all_ns = 0;
  };

  std::vector<Reading> last_;  // [local rank]
  int named_ = -1;             // rank
  double named_ratio_ = 1;
};

/// One line for the console.
std::string describe(const Straggler& straggler);

/// True if a rank is inside a collective or a rendezvous. That wait has a deadline of its own.
bool waits_for_others(const RankStatus& rank);

/// Notices that the ranks of this host make no progress: no step, and no collective that begins or
/// ends. A collective notices that one rank is missing, but not that all ranks are.
class StallWatch {
 public:
  explicit StallWatch(int64_t longest_ns) : longest_ns_(longest_ns) {}

  /// True if the ranks have made progress before, but none for the longest time, and at least one
  /// of them does not wait for others. `ranks` is [local rank].
  bool look(const std::vector<RankStatus>& ranks, int64_t now_ns);

 private:
  struct Reading {
    int64_t step = 0;
    int64_t sequence = 0;
    int64_t finished_ns = 0;
    bool operator==(const Reading&) const = default;
  };

  const int64_t longest_ns_;
  std::vector<Reading> last_;   // [local rank]
  int64_t progressed_ns_ = -1;  // -1: not yet
};

}  // namespace lockstep
