#pragma once

#include <vector>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// One short run made to see how rows are divided.
struct SplitRun {
  int64_t rows = 0;
  int devices = 0;
  RunRecord record;
};

/// All the records of one lab 5; tables and answers are functions of this.
struct Lab5Results {
  RunSet single;
  std::vector<RunSet>
      data_parallel;  ///< ascending by devices; the last has all that were asked for
  std::vector<SplitRun> splits;
  double others_busy_cores = 0;  ///< cores that other programs kept busy when the lab began

  const RunSet& full() const { return data_parallel.back(); }
};

/// Sorts records to their set-ups.
Lab5Results collect_lab5(const Finished& finished);

}  // namespace lockstep::cli
