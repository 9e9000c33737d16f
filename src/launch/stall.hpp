#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/detail/board.hpp"

namespace lockstep {

/// True if a rank is inside a collective or a rendezvous. That wait has a deadline of its own.
bool waits_for_others(const RankStatus& rank);

/// Notices that the ranks of this host make no progress: no step, and no collective that begins or
/// ends. Collectives notice a rank that does not come, but not that no rank comes.
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
