#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// The run with one number of micro-batches, or of rows.
struct SizedRuns {
  int64_t size = 0;
  RunSet runs = {};
};

/// All the records of one lab 10; tables and answers are functions of this.
struct Lab10Results {
  RunSet single;                         ///< one process, one stage, the batch whole
  RunSet base;                           ///< 10.1
  std::vector<SizedRuns> micro_batches;  ///< 10.2: ascending, the base among them
  std::vector<SizedRuns> batches;        ///< 10.3: ascending, the base among them
  RunSet one_process;                    ///< 10.4
  RunSet same_device;                    ///< 10.5

  // In one process, repeated in turns.
  RunSet sequential;
  RunSet gpipe;
  RunSet one_f_one_b;
  RunSet zero_bubble;

  double others_busy_cores = 0;  ///< when the lab began
};

Lab10Results collect_lab10(const Finished& finished);

}  // namespace lockstep::cli
