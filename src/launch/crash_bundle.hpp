#pragma once

#include <string>
#include <vector>

#include "launch/root_cause.hpp"
#include "launch/worker_environment.hpp"

namespace lockstep {

/// Everything that is known about a failed attempt, for the person who has to find out why: one
/// JSON file with versions, plan, environment (no secrets), and for each rank of this host how it
/// ended, what it showed last, its last collectives, its stack and the ends of its logs.
struct CrashBundle {
  const LaunchPlan& plan;
  const AttemptEnvironment& environment;
  const Board& board;
  const std::vector<RankView>& ranks;
  std::string failure;  ///< the block that the launcher prints
};

/// Writes it into the attempt's log folder and returns its path; "" if that failed.
std::string write_crash_bundle(const CrashBundle& bundle);

}  // namespace lockstep
