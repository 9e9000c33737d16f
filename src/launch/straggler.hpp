#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/detail/board.hpp"

namespace lockstep {

/// A rank that takes longer for its own part of a step than the others, who wait for it.
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

}  // namespace lockstep
