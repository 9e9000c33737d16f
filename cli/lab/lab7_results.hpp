#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// The runs with one number of micro-steps in a step, in fp32.
struct AccumulationRuns {
  int64_t micro_steps = 1;
  RunSet no_sync = {};    ///< one synchronisation in a step
  RunSet synced = {};     ///< one in each micro-step
  RunSet undivided = {};  ///< once: the loss is not divided
  RunSet one_batch = {};  ///< all rows at once, without accumulation
};

/// All the records of one lab 7; tables and answers are functions of this.
struct Lab7Results {
  RunSet fp32;                                  ///< no accumulation
  std::vector<AccumulationRuns> accumulations;  ///< ascending by micro-steps, never empty
  RunSet amp;                                   ///< no accumulation, with a scaler
  RunSet combined;                              ///< amp, and the fewest micro-steps
  RunSet no_scaler;                             ///< once
  RunSet overflow;                              ///< once: planted, with a scaler
  RunSet overflow_no_scaler;                    ///< once: planted, without
  int64_t overflow_at = 0;                      ///< the optimizer step of the planted overflow
  double others_busy_cores = 0;                 ///< when the lab began

  const AccumulationRuns& first() const { return accumulations.front(); }
  const std::string& precision() const { return amp.runs.front().amp; }
  int ranks() const { return fp32.devices; }
};

Lab7Results collect_lab7(const Finished& finished);

}  // namespace lockstep::cli
