#pragma once

#include <string>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/record.hpp"
#include "lockstep/run_meter.hpp"
#include "lockstep/world.hpp"

namespace lockstep {

/// Writes the record of a training loop to the file that the variable LOCKSTEP_RECORD names, as
/// `lockstep compare` does; without the variable nothing is written. The meter fills in what it
/// measured. `about` holds what only the program knows, such as options, split and effective_batch.
/// With a world the record is the whole job's, and the call is collective: every rank makes it.
///
///     save_record(meter, world, {.split = {rows}, .effective_batch = batch});
void save_record(const RunMeter& meter, RunRecord about = {});
void save_record(const RunMeter& meter, const World& world, RunRecord about = {});

/// One rank's record, and the time of each of its timed steps.
struct RankMeasurements {
  RunRecord record;
  std::vector<double> step_ms;
};

/// The record of a job from those of its ranks. Step times are those of the slowest rank in each
/// step, losses are means over all rows, communication is the mean over the ranks, buckets are rank
/// 0's.
RunRecord job_record(const std::vector<RankMeasurements>& ranks);

}  // namespace lockstep
