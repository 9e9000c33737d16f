// How the reports of several ranks become the record and the timeline of one job.

#include "course/job_record.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "course/result_table.hpp"
#include "support.hpp"

namespace lockstep {
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
        const auto place = static_cast<size_t>(rank);
        RankReport mine = report_of(rank, ranks);
        if (rank == 1) mine.record.losses[0] = INFINITY;  // JSON has no number for it
        gathered[place] = course::gather_reports(comms[place], mine);
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(gathered[0].size(), static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const auto place = static_cast<size_t>(rank);
      RankReport expected = report_of(rank, ranks);
      if (rank == 1) expected.record.losses[0] = INFINITY;
      EXPECT_EQ(to_json(gathered[0][place].record), to_json(expected.record));
      EXPECT_EQ(gathered[0][place].step_ms, expected.step_ms);
      ASSERT_EQ(gathered[0][place].spans.size(), 1U);
      EXPECT_EQ(gathered[0][place].spans[0].rank, rank);
      EXPECT_EQ(gathered[0][place].spans[0].args, expected.spans[0].args);
      EXPECT_EQ(gathered[place].empty(), rank > 0);
    }
  }
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
}  // namespace lockstep
