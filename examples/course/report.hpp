#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "course/hybrid.hpp"
#include "course/pipeline_meter.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/record.hpp"
#include "lockstep/table.hpp"
#include "lockstep/trace.hpp"

namespace course {

/// What one rank measured. Its record is that of a run of its own: its devices, rows and losses.
struct RankReport {
  lockstep::RunRecord record;
  std::vector<double> step_ms;             // of each timed step
  std::vector<lockstep::TraceSpan> spans;  // empty without --trace
  int64_t clock_ns = 0;                    // monotonic_ns() when all ranks left the same barrier
  std::optional<PipelineReport> pipeline = {};
};

/// Every rank's report on rank 0, by rank; nothing on the others. Collective.
std::vector<RankReport> gather_reports(const lockstep::Communicator& comm, const RankReport& mine);

/// The record of the job without its pipeline, which job_pipeline() gives.
lockstep::RunRecord job_record(const std::vector<RankReport>& reports);

/// The pipeline of the whole job from those of its ranks: the stages and actions of all ranks, span
/// and bubble as measured and as the schedule predicts them from the stages' mean times, and the
/// mean traffic of the ranks along each axis.
lockstep::PipelineRecord job_pipeline(const std::vector<RankReport>& reports,
                                      const HybridPlan& plan, const Link& link);

/// One timeline of all ranks: a row for each device, and below them one for communication. Ranks on
/// other hosts, whose clocks differ, are moved to rank 0's clock.
void fill_job_trace(const std::vector<RankReport>& reports, lockstep::Trace& trace);

/// What each device of one process did.
lockstep::Table device_table(const lockstep::RunRecord& record);

/// What each rank of a job did, how much of the communication was hidden, and who was slowest.
lockstep::Table rank_table(const lockstep::RunRecord& job, const std::vector<RankReport>& reports);

/// What each stage did, and the bubble as predicted and measured.
lockstep::Table stage_table(const lockstep::PipelineRecord& pipeline);

/// What ranks sent each other along each axis, as predicted and measured.
lockstep::Table axis_table(const lockstep::PipelineRecord& pipeline);

}  // namespace course
