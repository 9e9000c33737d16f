#pragma once

#include <string>
#include <vector>

#include "launch/plan.hpp"
#include "launch/rendezvous.hpp"

namespace lockstep {

/// What is the same for all ranks of this host in one round.
struct RoundEnvironment {
  JobLayout layout;
  int round = 0;      ///< TORCHELASTIC_RESTART_COUNT
  std::string board;  ///< path of the launcher's board
  std::string logs;   ///< folder of this round
  std::string token;  ///< several hosts only
};

/// Variables of one rank, "NAME=value": torchrun's contract and lockstep's own, over `inherited`.
std::vector<std::string> worker_environment(const LaunchPlan& plan, const RoundEnvironment& round,
                                            int local_rank,
                                            const std::vector<std::string>& inherited);

/// Where rank `rank` leaves its error for whoever started it.
std::string error_file(const std::string& logs, int rank);

}  // namespace lockstep
