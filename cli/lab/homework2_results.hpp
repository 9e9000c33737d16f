#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// Codes 1 and 3 with one ACCUM_STEPS.
struct AccumPoint {
  int64_t accum_steps = 1;
  RunSet fp32 = {};      ///< code 1: accumulation
  RunSet combined = {};  ///< code 3: accumulation and autocast
};

/// All the records of one homework 2; tables and answers are functions of this.
struct Homework2Results {
  RunSet fp32;                     ///< neither technique: what code 2 is held against
  RunSet amp;                      ///< code 2: autocast and GradScaler
  std::vector<AccumPoint> points;  ///< ascending by ACCUM_STEPS, never empty
  RunSet synced;                   ///< code 1 at the first point, all-reduce in each micro-step
  RunSet one_batch;                ///< once: all rows of the first point at once, in fp32
  RunSet undivided;                ///< once: code 1 at the first point, loss undivided
  double others_busy_cores = 0;    ///< when the lab began

  const AccumPoint& first() const { return points.front(); }
  const AccumPoint& last() const { return points.back(); }
  const std::string& precision() const { return amp.runs.front().amp; }
  int ranks() const { return fp32.devices; }
};

Homework2Results collect_homework2(const Finished& finished);

}  // namespace lockstep::cli
