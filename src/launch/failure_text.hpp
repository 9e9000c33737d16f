#pragma once

#include <string>
#include <vector>

#include "launch/verdict.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// What the failure block says besides the verdict.
struct FailureFacts {
  std::string host;
  std::string program;  ///< as the user wrote it
  int world_size = 1;
  std::string logs;                      ///< folder of this round
  std::string error_message;             ///< from the root's error file; "" where there is none
  std::vector<std::string> last_errors;  ///< the root's last lines that the console did not show
  std::string remote;                    ///< what another host told about its rank; "" or one line
  int64_t now_ns = 0;
};

/// The block that a failed run ends with: at most 15 lines, each one line.
Error failure_error(const Verdict& verdict, const std::vector<RankView>& views,
                    const FailureFacts& facts);

/// One line for other hosts, and for a run that is about to start again.
std::string failure_line(const Verdict& verdict, const std::vector<RankView>& views,
                         const FailureFacts& facts);

}  // namespace lockstep
