#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/lab5_plan.hpp"
#include "lockstep/record.hpp"

namespace lockstep::cli {

/// The repeated runs of one program on one set of devices.
struct RunSet {
  int devices = 1;
  std::vector<RunRecord> runs;  // [repetition]
};

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

/// Sorts records to their set-ups; each experiment comes with its record.
Lab5Results collect(const std::vector<std::pair<Experiment, RunRecord>>& finished);

/// Mean, deviation and range over all timed steps of all repetitions, in milliseconds. Median and
/// p95 cannot be had from summaries and stay 0.
Stats pooled_step_ms(const RunSet& set_up);

double mean_total_s(const RunSet& set_up);

/// Each device over all repetitions: mean busy fraction, largest bytes.
std::vector<DeviceRecord> merged_devices(const RunSet& set_up);

/// How many logical devices use the same hardware, at most; 1: each has its own.
int sharing(const RunSet& set_up);

/// How much more device 0 has than the others have on average; 0 where there are no others.
int64_t extra_on_first(const std::vector<DeviceRecord>& devices, int64_t DeviceRecord::*bytes);

/// From this many cores on, other programs are said to disturb the measurement.
inline constexpr double kDisturbingCores = 0.25;

/// From this efficiency on a speed-up is called proportional to the devices.
inline constexpr double kProportional = 0.9;

/// A set-up against the single device, repetition by repetition.
struct Comparison {
  Stats speedup;          ///< over the repetitions
  double efficiency = 0;  ///< speed-up over devices; 1 is proportional
  double noise = 0;       ///< largest deviation of the run means, as a fraction of their mean
  bool unsafe = false;    ///< the noise is so large that the comparison proves little
};

Comparison compare(const RunSet& single, const RunSet& other);

}  // namespace lockstep::cli
