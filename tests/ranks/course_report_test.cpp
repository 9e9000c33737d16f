// How the reports of several ranks become the record, the timeline and the tables of one job.

#include "course/report.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "support.hpp"

namespace lockstep::test::course_report_test {
namespace {

using course::RankReport;

// Rank r has r + 1 rows, loss 10 r + step, and is slowest in the step of its own number.
RankReport report_of(int rank, int ranks) {
  RankReport report;
  RunRecord& record = report.record;
  record.program = "practical6_ddp";
  record.host = {{"name", "here"}};
  record.effective_batch = ranks * (ranks + 1) / 2;
  record.split = {rank + 1};
  record.devices.resize(1);
  record.devices[0].name = "cpu:" + std::to_string(rank);
  record.devices[0].peak_bytes = 100 + rank;
  record.total_s = 1 + rank;
  record.comm_ms = 3;
  record.exposed_comm_ms = rank;
  record.all_reduces = {.count = 2, .bytes = 4096};
  for (int step = 0; step < ranks; ++step) {
    record.losses.push_back(10.0 * rank + step);
    report.step_ms.push_back(step == rank ? 50 : 10 + rank);
  }
  record.step_ms = summarize(report.step_ms);
  report.spans = {{.rank = rank,
                   .device = 0,
                   .name = "forward",
                   .begin_ns = 1000,
                   .end_ns = 2000,
                   .args = {{"rows", std::to_string(rank + 1)}}}};
  return report;
}

std::vector<RankReport> reports_of(int ranks) {
  std::vector<RankReport> reports;
  for (int rank = 0; rank < ranks; ++rank) reports.push_back(report_of(rank, ranks));
  return reports;
}

TEST(JobRecord, IsThatOfTheWholeJob) {
  const RunRecord job = course::job_record(reports_of(3));
  EXPECT_EQ(job.world_size, 3);
  EXPECT_EQ(job.split, (std::vector<int64_t>{1, 2, 3}));
  ASSERT_EQ(job.devices.size(), 3U);
  EXPECT_EQ(job.devices[2].name, "cpu:2");
  EXPECT_EQ(job.devices[2].peak_bytes, 102);
  EXPECT_EQ(job.total_s, 3);
  EXPECT_EQ(job.comm_ms, 3);
  EXPECT_DOUBLE_EQ(job.exposed_comm_ms, 1);
  EXPECT_EQ(job.all_reduces.bytes, 4096) << "of one rank, not of all together";
  ASSERT_EQ(job.ranks.size(), 3U);
  EXPECT_DOUBLE_EQ(job.ranks[2].step_ms, (12 + 12 + 50) / 3.0);
}

TEST(JobRecord, AStepIsAsLongAsItsSlowestRank) {
  const RunRecord job = course::job_record(reports_of(3));
  EXPECT_EQ(job.step_ms.n, 3);
  EXPECT_EQ(job.step_ms.mean, 50) << "another rank is slowest in each step";
  EXPECT_DOUBLE_EQ(job.samples_per_s, 6 * 3 / 0.150);
}

TEST(JobRecord, ALossCountsByItsRows) {
  const RunRecord job = course::job_record(reports_of(3));
  ASSERT_EQ(job.losses.size(), 3U);
  for (int step = 0; step < 3; ++step) {
    const double expected = (1 * step + 2 * (10 + step) + 3 * (20 + step)) / 6.0;
    EXPECT_DOUBLE_EQ(job.losses[static_cast<size_t>(step)], expected);
  }
  auto diverged = reports_of(2);
  diverged[1].record.losses[0] = std::nan("");
  EXPECT_TRUE(std::isnan(course::job_record(diverged).losses[0]));
}

TEST(JobRecord, ReportsReachRankZeroUnchanged) {
  for (const int ranks : {1, 2, 3, 5}) {
    const auto comms = Communicator::threads(ranks);
    std::vector<std::vector<RankReport>> gathered(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto own = static_cast<size_t>(rank);
        RankReport mine = report_of(rank, ranks);
        if (rank == 1) mine.record.losses[0] = INFINITY;  // JSON has no number for it
        if (rank == 2) mine.pipeline = course::PipelineReport{1, 2, {{5, 9, 3}}};
        gathered[own] = course::gather_reports(comms[own], mine);
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(gathered[0].size(), static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const auto own = static_cast<size_t>(rank);
      RankReport expected = report_of(rank, ranks);
      if (rank == 1) expected.record.losses[0] = INFINITY;
      EXPECT_EQ(to_json(gathered[0][own].record), to_json(expected.record));
      EXPECT_EQ(gathered[0][own].step_ms, expected.step_ms);
      ASSERT_EQ(gathered[0][own].spans.size(), 1U);
      EXPECT_EQ(gathered[0][own].spans[0].rank, rank);
      EXPECT_EQ(gathered[0][own].spans[0].args, expected.spans[0].args);
      EXPECT_EQ(gathered[own].empty(), rank > 0);
      ASSERT_EQ(gathered[0][own].pipeline.has_value(), rank == 2);
      if (rank != 2) continue;
      EXPECT_EQ(gathered[0][own].pipeline->pipeline, 1);
      EXPECT_EQ(gathered[0][own].pipeline->ranks, 2);
      ASSERT_EQ(gathered[0][own].pipeline->calls.size(), 1U);
      EXPECT_EQ(gathered[0][own].pipeline->calls[0].busy_ns, 3);
    }
  }
}

// Two ranks form one pipeline with two micro-batches: F0 F1 B0 B1 of 10 ms each on rank 0,
// the same on rank 1, whose clock is 70 us ahead and whose messages take 1 ms.
std::vector<RankReport> pipeline_reports() {
  auto reports = reports_of(2);
  const double forward_begin_ms[2][2] = {{0, 10}, {11, 21}};
  const double backward_begin_ms[2][2] = {{42, 52}, {31, 41}};
  reports[1].clock_ns = 70'000;
  for (int rank : {0, 1}) {
    auto& report = reports[static_cast<size_t>(rank)];
    PipelineRecord pipeline;
    pipeline.schedule = "gpipe";
    pipeline.micro_batches = 2;
    pipeline.stages = {{.rank = rank,
                        .stage = rank,
                        .device = "cpu:" + std::to_string(rank),
                        .layers = 1,
                        .forward_ms = 10,
                        .backward_ms = 10,
                        .message_bytes = rank == 0 ? 1000 : 0}};
    const double begin_ms = forward_begin_ms[rank][0];
    for (int m : {0, 1}) {
      const double f = forward_begin_ms[rank][m] - begin_ms;
      const double b = backward_begin_ms[rank][m] - begin_ms;
      const std::string device = "cpu:" + std::to_string(rank);
      pipeline.actions.push_back({"F", rank, rank, m, device, f, f + 10});
      pipeline.actions.push_back({"B", rank, rank, m, device, b, b + 10});
    }
    pipeline.axes = {{.name = "data"},
                     {.name = "pipeline", .size = 2, .calls = 2, .bytes = 2000 + 1000 * rank},
                     {.name = "tensor"}};
    report.record.pipeline = pipeline;
    const auto at_ns = [&](double ms) {
      return static_cast<int64_t>(ms * 1e6) + 5'000'000 + report.clock_ns;
    };
    report.pipeline = course::PipelineReport{
        .pipeline = 0,
        .ranks = 1,
        .calls = {{at_ns(begin_ms), at_ns(backward_begin_ms[rank][1] + 10), 40'000'000}}};
  }
  return reports;
}

course::HybridPlan pipeline_plan() {
  return {.schedule = gpipe(2, 2), .over_ranks = true, .data = 1, .pipeline = 2, .tensor = 1};
}

TEST(JobPipeline, PutsTheRanksOnOneClock) {
  const auto job = course::job_pipeline(pipeline_reports(), pipeline_plan(), {.call_ms = 1});
  ASSERT_EQ(job.stages.size(), 2U);
  EXPECT_EQ(job.stages[1].rank, 1);
  ASSERT_EQ(job.actions.size(), 8U);
  EXPECT_EQ(job.actions[2].rank, 1);
  EXPECT_NEAR(job.actions[2].begin_ms, 11, 1e-6) << "though its own clock began there";
  EXPECT_NEAR(job.actions.back().end_ms, 62, 1e-6);
  EXPECT_NEAR(job.span_ms, 62, 1e-6);
  EXPECT_NEAR(job.bubble, 1 - 80 / 124.0, 1e-6);
}

TEST(JobPipeline, PredictsWhatTheStagesTimesAndTheLinkGive) {
  const auto job = course::job_pipeline(pipeline_reports(), pipeline_plan(), {.call_ms = 1});
  EXPECT_NEAR(job.predicted_span_ms, job.span_ms, 1e-6) << "the run was ideal";
  EXPECT_NEAR(job.predicted_bubble, job.bubble, 1e-6);
  ASSERT_EQ(job.predicted.size(), 8U);
  EXPECT_EQ(job.predicted[2].rank, 1);
  EXPECT_EQ(job.predicted[2].device, "cpu:1");
  EXPECT_NEAR(job.predicted[2].begin_ms, 11, 1e-6);
}

TEST(JobPipeline, MeasuresTheMessagesThatSomeoneWaitedFor) {
  const auto job = course::job_pipeline(pipeline_reports(), pipeline_plan(), {});
  ASSERT_EQ(job.axes.size(), 3U);
  EXPECT_EQ(job.axes[1].bytes, 2500) << "the mean of the ranks";
  EXPECT_NEAR(job.axes[1].ms, 2 * 1, 1e-6) << "each of a rank's two messages took 1 ms";
  EXPECT_EQ(job.axes[0].ms, 0);
}

TEST(JobPipeline, TakesTheMeanOfSeveralPipelines) {
  auto reports = pipeline_reports();
  reports.push_back(reports[0]);
  reports.push_back(reports[1]);
  for (size_t rank : {2, 3}) {
    auto& report = reports[rank];
    report.pipeline->pipeline = 1;
    report.pipeline->calls[0].end_ns += 10'000'000;  // 72 ms, with rank 0's clock
    for (auto& action : report.record.pipeline->actions) action.rank = static_cast<int>(rank);
  }
  auto plan = pipeline_plan();
  plan.data = 2;
  const auto job = course::job_pipeline(reports, plan, {});
  EXPECT_NEAR(job.span_ms, (62 + 72) / 2.0, 1e-6);
  EXPECT_NEAR(job.bubble, 1 - (80 / 124.0 + 80 / 144.0) / 2, 1e-6);
}

TEST(JobTrace, MovesOtherHostsToTheClockOfRankZero) {
  auto reports = reports_of(2);
  reports[0].clock_ns = 500;
  reports[1].clock_ns = 70'500;
  reports[1].spans[0].begin_ns += 70'000;
  reports[1].spans[0].end_ns += 70'000;
  Trace trace;
  course::fill_job_trace(reports, trace);
  const auto spans = trace.spans();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[1].rank, 1);
  EXPECT_EQ(spans[1].begin_ns, spans[0].begin_ns);
  EXPECT_EQ(spans[1].end_ns, spans[0].end_ns);
}

TEST(RankTable, NamesTheRankThatOthersWaitFor) {
  auto reports = reports_of(3);
  // All steps last as long, since ranks wait for each other; rank 1 waits least.
  for (auto& report : reports) report.record.step_ms.mean = 20;
  reports[0].record.exposed_comm_ms = 5;
  reports[1].record.exposed_comm_ms = 0.5;
  reports[2].record.exposed_comm_ms = 6;
  const auto table = course::rank_table(course::job_record(reports), reports);
  ASSERT_EQ(table.rows().size(), 3U);
  EXPECT_EQ(table.rows()[1][0], "1");
  EXPECT_EQ(table.rows()[2][4], "30 %") << "communicating";
  std::string notes;
  for (const auto& note : table.notes()) notes += note + "\n";
  EXPECT_NE(notes.find("slowest rank: 1, 19.500 ms"), std::string::npos) << notes;
  EXPECT_NE(notes.find("4.00 KiB in 2 all-reduces"), std::string::npos) << notes;
}

}  // namespace
}  // namespace lockstep::test::course_report_test
