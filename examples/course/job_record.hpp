#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/communicator.hpp"
#include "lockstep/record.hpp"
#include "lockstep/trace.hpp"

namespace course {

/// One call of Pipeline::step on one rank: from its first action's begin to its last one's end.
struct PipelineCall {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t busy_ns = 0;  // of all its actions together
};

/// A rank's part of a pipeline, beyond what its record says.
struct PipelineReport {
  int pipeline = 0;  // of the job's: ranks with the same number have the same rows
  int places = 1;    // of it on this rank
  std::vector<PipelineCall> calls = {};  // of the timed steps; the actions recorded are the last's
};

/// What one rank measured. Its record is that of a run of its own: its devices, its rows, its
/// losses.
struct RankReport {
  lockstep::RunRecord record;
  std::vector<double> step_ms;             // of each timed step
  std::vector<lockstep::TraceSpan> spans;  // empty without --trace
  int64_t clock_ns = 0;                    // monotonic_ns() when all ranks stood at one barrier
  std::optional<PipelineReport> pipeline = {};
};

/// Every rank's report on rank 0, by rank; nothing on the others. Collective.
std::vector<RankReport> gather_reports(const lockstep::Communicator& comm, const RankReport& mine);

/// The record of the job, but for its pipeline: that is job_pipeline()'s. Step times are those of
/// the slowest rank in each step, losses are means over all rows, communication is the mean over
/// the ranks, buckets are rank 0's.
lockstep::RunRecord job_record(const std::vector<RankReport>& reports);

/// One timeline of all ranks: a row for each device, and one for communication below them. Ranks
/// whose clocks differ, because they ran on other hosts, are moved to rank 0's.
void fill_job_trace(const std::vector<RankReport>& reports, lockstep::Trace& trace);

}  // namespace course
