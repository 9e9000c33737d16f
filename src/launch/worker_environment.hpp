#pragma once

#include <string>
#include <vector>

#include "launch/plan.hpp"
#include "launch/rendezvous.hpp"

namespace lockstep {

/// What all ranks of this host have in common in one attempt.
struct AttemptEnvironment {
  JobLayout layout;
  std::string board;  ///< path of the launcher's board
  std::string logs;   ///< folder of this attempt
  std::string token;  ///< several hosts only
};

/// The variables of one rank, "NAME=value": torchrun's contract and lockstep's own, over
/// `inherited`.
std::vector<std::string> worker_environment(const LaunchPlan& plan,
                                            const AttemptEnvironment& environment, int local_rank,
                                            const std::vector<std::string>& inherited);

/// Where a rank leaves its error for its launcher, and where it writes its stack.
std::string error_file_of(const std::string& logs, int rank);
std::string stack_file_of(const std::string& logs, int rank);

}  // namespace lockstep
