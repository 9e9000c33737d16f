#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_report.hpp"
#include "lab_support.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"
#include "support.hpp"

namespace lockstep::cli::lab6_test {
namespace {

using test::cores;
using test::expect_error;
using test::mentions;
using test::names_of;

const test::LabOf kLab{"6"};

// A made-up run on `devices` logical devices, each step `ms` long, device 0 with more memory.
RunRecord dp_run(int devices, double ms, int shared_by = 1) {
  RunRecord record;
  record.host = {{"name", "box"}};
  record.versions = {{"libtorch", "2.11.0"}};
  record.split = chunk_rows(64, devices);
  record.effective_batch = 64;
  record.step_ms = {.mean = ms, .median = ms, .p95 = ms, .min = ms, .max = ms, .n = 10};
  record.warmup_steps = 2;
  record.losses = {1.0, 0.5};
  for (int i = 0; i < devices; ++i) {
    const int64_t moved = devices == 1 ? 0 : (i == 0 ? (devices - 1) * 10_MiB : 10_MiB);
    record.devices.push_back(
        {.name = "cpu:" + std::to_string(i),
         .physical = shared_by > 1 ? "all cores, shared" : "core " + std::to_string(i),
         .shared_by = shared_by,
         .peak_bytes = i == 0 ? 30_MiB : 20_MiB,
         .final_bytes = i == 0 ? 24_MiB : 12_MiB,
         .busy_fraction = i == 0 ? 0.9 : 0.6,
         .sent_bytes_per_step = moved,
         .received_bytes_per_step = moved});
  }
  return record;
}

// The same through DDP: balanced, two buckets of which one finishes after backward.
RunRecord ddp_run(int ranks, double ms, int shared_by = 1) {
  RunRecord record = dp_run(ranks, ms, shared_by);
  record.program = "practical6_ddp";
  record.world_size = ranks;
  for (auto& device : record.devices) {
    device.peak_bytes = 25_MiB;
    device.final_bytes = 20_MiB;
    device.busy_fraction = 0.95;
    device.sent_bytes_per_step = device.received_bytes_per_step = ranks > 1 ? 8_MiB : 0;
  }
  record.all_reduces = {.count = 2, .bytes = 16_MiB};
  record.comm_ms = ranks > 1 ? 4 : 0;
  record.exposed_comm_ms = ranks > 1 ? 1 : 0;
  record.backward_ms = 20;
  record.buckets = {
      {.index = 0, .bytes = 4_MiB, .parameters = 2, .launched_ms = 6, .finished_ms = 8},
      {.index = 1, .bytes = 12_MiB, .parameters = 6, .launched_ms = 19.5, .finished_ms = 21.5}};
  return record;
}

RunSet set_of(const RunRecord& record) {
  const auto devices = static_cast<int>(record.devices.size());
  return {devices, std::vector<RunRecord>(3, record), devices};
}

// One rank and `ranks`, with these step times.
LabRuns results_of(int ranks, double one_ms, double dp_ms, double ddp_ms, int shared_by = 1) {
  LabRuns results;
  results.sets["single"] = {set_of(dp_run(1, one_ms))};
  results.sets["dp"] = {set_of(dp_run(1, one_ms))};
  results.sets["ddp"] = {set_of(ddp_run(1, one_ms))};
  if (ranks > 1) {
    results.sets["dp"].push_back(set_of(dp_run(ranks, dp_ms, shared_by)));
    results.sets["ddp"].push_back(set_of(ddp_run(ranks, ddp_ms, shared_by)));
  }
  return results;
}

TEST(Lab6Plan, RunsBothMethodsOnTheSameDevicesInTurns) {
  const LabPlan plan = kLab.plan({.quick = true, .own = {{"--ranks", "2"}}}, cores(2));
  EXPECT_EQ(names_of(plan), (std::vector<std::string>{
                                "single-cpu2-run1", "dp-cpu1-run1", "ddp-cpu1-run1", "dp-cpu2-run1",
                                "ddp-cpu2-run1", "single-cpu2-run2", "dp-cpu1-run2",
                                "ddp-cpu1-run2", "dp-cpu2-run2", "ddp-cpu2-run2"}));
  const Experiment& dp = plan.experiments[3];
  const Experiment& ddp = plan.experiments[4];
  EXPECT_EQ(ddp.ranks, 2);
  EXPECT_EQ(ddp.program, "practical6_ddp");
  EXPECT_EQ(dp.ranks, 0);
  EXPECT_EQ(ddp.arguments, dp.arguments) << "the same work";
  EXPECT_EQ(ddp.cores, dp.cores) << "on the same cores";
  EXPECT_EQ(plan.experiments[1].cores, std::vector<int>{0}) << "one rank, one rank's share";
}

TEST(Lab6Plan, TheCoursesRanksUnlessOthersAreNamed) {
  const auto ranks_of = [](const LabOptions& options, const Hardware& hardware) {
    std::set<int> ranks;
    for (const auto& experiment : kLab.plan(options, hardware).experiments) {
      if (experiment.keys[0].what == "ddp") ranks.insert(experiment.ranks);
    }
    return ranks;
  };
  using Ranks = std::set<int>;
  EXPECT_EQ(ranks_of({}, cores(2)), (Ranks{1, 2, 4}));
  EXPECT_EQ(ranks_of({.own = {{"--ranks", "5,3,3"}}}, cores(2)), (Ranks{1, 3, 5}))
      << "one is the baseline";
  EXPECT_EQ(ranks_of({.devices = "cpu:3"}, cores(4)), (Ranks{1, 2, 3}));
  EXPECT_EQ(ranks_of({.devices = "cpu:4", .own = {{"--ranks", "3"}}}, cores(4)), (Ranks{1, 3}));
  EXPECT_EQ(ranks_of({}, cores(16, 8)), (Ranks{1, 2, 4, 8})) << "a GPU each";
}

TEST(Lab6Plan, GpusServeWhereThereAreEnough) {
  const auto devices_of = [](const LabOptions& options, const Hardware& hardware) {
    const auto arguments = kLab.plan(options, hardware).experiments.back().arguments;
    return *(std::find(arguments.begin(), arguments.end(), "--devices") + 1);
  };
  EXPECT_EQ(devices_of({.own = {{"--ranks", "2"}}}, cores(8, 4)), "cuda:0,1");
  EXPECT_EQ(devices_of({.own = {{"--ranks", "2"}}}, cores(8, 1)), "cpu:2");
  EXPECT_EQ(devices_of({}, cores(8, 1)), "cpu:4");
}

TEST(Lab6Plan, RefusesRanksWithoutADeviceOrARow) {
  expect_error(Code::kUsage, {"4 ranks need a device each", "--devices cpu:2 names 2"}, [] {
    kLab.plan({.devices = "cpu:2", .own = {{"--ranks", "4"}}}, cores(2));
  });
  expect_error(Code::kSplit, {"--batch 3", "4 ranks"}, [] {
    kLab.plan({.batch = 3, .own = {{"--ranks", "4"}}}, cores(2));
  });
}

TEST(Lab6Plan, BucketSizesReachDdpOnly) {
  const LabPlan plan = kLab.plan({.own = {{"--ranks", "2"}, {"--bucket-mib", "0.5"}}}, cores(2));
  for (const auto& experiment : plan.experiments) {
    const auto& arguments = experiment.arguments;
    const auto found = std::find(arguments.begin(), arguments.end(), "--bucket-mib");
    EXPECT_EQ(found != arguments.end(), experiment.keys[0].what == "ddp") << experiment.name;
    EXPECT_TRUE(found == arguments.end() || *(found + 1) == "0.5");
  }
}

TEST(Lab6Results, CollectsRecordsToTheirSetUps) {
  const auto plan = kLab.plan({.quick = true, .own = {{"--ranks", "3,2"}}}, cores(2));
  LabRuns results;
  for (const auto& experiment : plan.experiments) {
    results.add(experiment, dp_run(experiment.devices, 1));
  }
  EXPECT_EQ(results.of("single").runs.size(), 2U);
  ASSERT_EQ(results.all("dp").size(), 3U);
  ASSERT_EQ(results.all("ddp").size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(results.all("ddp")[i].devices, static_cast<int>(i) + 1);
    EXPECT_EQ(results.all("dp")[i].runs.size(), 2U);
  }
}

TEST(Lab6Results, LooksCloselyAtRanksWithHardwareOfTheirOwn) {
  const auto looks_at = [](const LabRuns& runs) { return kLab.table(runs, "overlap").title(); };
  LabRuns results = results_of(2, 100, 60, 52);
  EXPECT_TRUE(looks_at(results).ends_with("with 2 ranks"));
  results.sets["dp"].push_back(set_of(dp_run(4, 70, 4)));
  results.sets["ddp"].push_back(set_of(ddp_run(4, 70, 4)));
  EXPECT_TRUE(looks_at(results).ends_with("with 2 ranks")) << "four ranks share the cores";
  EXPECT_TRUE(looks_at(results_of(2, 100, 90, 90, 2)).ends_with("with 2 ranks"))
      << "all share: the most ranks";
  EXPECT_TRUE(looks_at(results_of(1, 100, 0, 0)).ends_with("with 1 rank"));
}

TEST(Lab6Results, CommunicationIsHiddenOrExposed) {
  const Communication time = communication_of(set_of(ddp_run(2, 50)));
  EXPECT_DOUBLE_EQ(time.total_ms, 4);
  EXPECT_DOUBLE_EQ(time.hidden_ms, 3);
  EXPECT_DOUBLE_EQ(time.exposed_ms, 1);
  EXPECT_DOUBLE_EQ(time.hidden_share(), 0.75);
  EXPECT_EQ(communication_of(set_of(ddp_run(1, 50))).hidden_share(), 0);
}

TEST(Lab6Tables, ThePagesTableIsFilledIn) {
  const Table table = kLab.table(results_of(2, 100, 60, 50), "aspects");
  ASSERT_EQ(table.columns().size(), 3U);
  EXPECT_EQ(table.columns()[1].header, "DataParallel");
  EXPECT_EQ(table.columns()[2].header, "DDP");
  using Rows = std::vector<std::vector<std::string>>;
  EXPECT_EQ(table.rows(), (Rows{{"processes", "1", "2"},
                                {"data split", "by itself", "by the program"},
                                {"… rows per device", "32 32", "32 32"},
                                {"device use: busy", "60 to 90 %", "95 %"},
                                {"… peak of device 0", "30.0 MiB", "25.0 MiB"},
                                {"… peak of device 1", "20.0 MiB", "25.0 MiB"},
                                {"scaling: step time", "60.0 ± 0.0 ms", "50.0 ± 0.0 ms"},
                                {"… speed-up", "1.67 ± 0.00", "2.00 ± 0.00"}}));
  EXPECT_TRUE(table.csv().starts_with(
      "name,processes,data_split,data_split_rows_per_device_0,data_split_rows_per_device_1,"
      "device_use_busy_least_percent,device_use_busy_most_percent,device_use_peak_of_device_0_"
      "mib,"))
      << table.csv();
}

TEST(Lab6Tables, MethodsStandSideBySide) {
  const Table table = kLab.table(results_of(2, 100, 60, 50), "methods");
  const auto& rows = table.rows();
  ASSERT_EQ(rows.size(), 5U);
  EXPECT_EQ(rows[0], (std::vector<std::string>{"single", "1", "1", "64", "100 ± 0 ms", "1"}));
  EXPECT_EQ(rows[3],
            (std::vector<std::string>{"DP", "1", "2", "32 32", "60.0 ± 0.0 ms", "1.67 ± 0.00"}));
  EXPECT_EQ(rows[4],
            (std::vector<std::string>{"DDP", "2", "2", "32 32", "50.0 ± 0.0 ms", "2.00 ± 0.00"}));
  EXPECT_TRUE(mentions(table.notes().back(), "On 2 devices DDP is 1.20 times as fast as DP."));
  EXPECT_TRUE(mentions(kLab.table(results_of(2, 100, 50, 60), "methods").notes().back(),
                       "DDP is 1.20 times slower than DP."));
  EXPECT_TRUE(mentions(kLab.table(results_of(2, 100, 50, 51), "methods").notes().back(),
                       "DDP is not measurably faster or slower than DP (0.98 ± 0.00 times)."));
}

TEST(Lab6Tables, FitATerminalOf80Columns) {
  LabRuns results = results_of(2, 100, 60, 50);
  results.sets["dp"].push_back(set_of(dp_run(4, 90, 4)));
  results.sets["ddp"].push_back(set_of(ddp_run(4, 60, 4)));
  for (const auto& [name, table] : kLab.report(results).tables) {
    EXPECT_LE(test::width_of(table), 80U) << name;
  }
}

TEST(Lab6Tables, NoiseAndABusyMachineAreToldOnce) {
  LabRuns results = results_of(2, 100, 60, 50);
  EXPECT_EQ(kLab.report(results).warning, "");
  const auto expect_told = [&results](const std::string& reason) {
    const LabReport report = kLab.report(results);
    EXPECT_TRUE(mentions(report.warning, reason)) << report.warning;
    for (const auto& [name, table] : report.tables) {
      for (const auto& note : table.notes()) {
        EXPECT_FALSE(mentions(note, "Warning")) << name;
        EXPECT_FALSE(mentions(note, "times as fast")) << name;
      }
    }
    for (const char* question : {"is faster", "scales"}) {
      const std::string text = kLab.answer(results, question);
      EXPECT_TRUE(text.starts_with("That cannot be judged from this run. ")) << text;
    }
    for (const auto& answer : report.answers) {
      for (const char* part : {"ther programs", "proves little", "rough figure", "hidden behind"}) {
        EXPECT_FALSE(mentions(answer.text, part)) << answer.text;
      }
    }
  };
  results.sets["ddp"][1].runs[0] = ddp_run(2, 90);
  expect_told("step times of the same set-up varied by 36 % between runs");
  results.others_busy_cores = 1;
  expect_told("other programs kept 1.0 cores busy");
}

TEST(Lab6Tables, BalanceShowsDevice0OfBothMethods) {
  const auto rows = kLab.table(results_of(2, 100, 60, 50), "balance").rows();
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[0], (std::vector<std::string>{"DP", "cpu:0", "core 0", "32", "90 %", "30.0 MiB",
                                               "10.0 MiB", "10.0 MiB"}));
  EXPECT_EQ(rows[3], (std::vector<std::string>{"DDP", "cpu:1", "core 1", "32", "95 %", "25.0 MiB",
                                               "8.00 MiB", "8.00 MiB"}));
}

TEST(Lab6Tables, BucketsStandAgainstTheEndOfBackward) {
  LabRuns results = results_of(2, 100, 60, 50);
  auto& buckets = results.sets["ddp"][1].runs[0].buckets;
  buckets.push_back(
      {.index = 2, .bytes = 1_KiB, .parameters = 1, .launched_ms = 20.5, .finished_ms = 22});
  const auto rows = kLab.table(results, "overlap").rows();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0], (std::vector<std::string>{"0", "2", "4.00 MiB", "6.00 ms", "8.00 ms",
                                               "-12.0 ms", "yes"}));
  EXPECT_EQ(rows[1][5], "+1.50 ms");
  EXPECT_EQ(rows[1].back(), "in part");
  EXPECT_EQ(rows[2][5], "+2.00 ms");
  EXPECT_EQ(rows[2].back(), "no");
  EXPECT_TRUE(mentions(kLab.table(results, "overlap").notes().at(0),
                       "from the start of backward, which ended after 20.0 ms"));
}

TEST(Lab6Tables, CommunicationIsDividedForEachNumberOfRanks) {
  const auto rows = kLab.table(results_of(2, 100, 60, 50), "communication").rows();
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[1], (std::vector<std::string>{"2", "2", "16.0 MiB", "4.00 ms", "1.00 ms", "75 %",
                                               "2.0 %"}));
}

TEST(Lab6Tables, ScalingIsAgainstTheMethodItself) {
  const auto rows = kLab.table(results_of(2, 100, 80, 50), "scaling").rows();
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_EQ(rows[1][4], "1.25 ± 0.00");
  EXPECT_EQ(rows[1].back(), "62 %, no");
  EXPECT_EQ(rows[2].back(), "—");
  EXPECT_EQ(rows[3].back(), "100 %, yes");
  EXPECT_EQ(kLab.table(results_of(2, 100, 90, 90, 2), "scaling").rows().back().back(),
            "cannot tell");
}

TEST(Lab6Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  LabRuns bare = results_of(2, 100, 60, 50);
  for (auto& set_up : bare.sets["ddp"]) {
    for (auto& run : set_up.runs) {
      run.buckets.clear();
      run.backward_ms = run.comm_ms = run.exposed_comm_ms = 0;
      run.all_reduces = {};
    }
  }
  for (const auto& results : {results_of(2, 100, 60, 50), results_of(3, 100, 130, 120, 3),
                              results_of(1, 9, 0, 0), bare}) {
    const auto answers = kLab.report(results).answers;
    EXPECT_EQ(answers.size(), 10U);
    for (const auto& answer : answers) {
      EXPECT_TRUE(answer.text.ends_with(".")) << answer.question << answer.text;
      EXPECT_FALSE(mentions(answer.text, "nan")) << answer.text;
      EXPECT_FALSE(mentions(answer.text, "inf ")) << answer.text;
    }
  }
}

TEST(Lab6Answers, ProcessesAndDevicesAreNamed) {
  const std::string text = kLab.answer(results_of(2, 100, 60, 50), "How many processes");
  EXPECT_TRUE(text.starts_with(
      "2, one for each device: rank 0 on cpu:0 (core 0) and rank 1 on cpu:1 (core 1). "
      "DataParallel drove the same 2 devices from 1 process."))
      << text;
  EXPECT_TRUE(mentions(text, "DDP with 1 and 2 processes")) << text;
}

TEST(Lab6Answers, TheSplitIsTheProgramsOwn) {
  EXPECT_TRUE(kLab.answer(results_of(2, 100, 60, 50), "automatically").starts_with("No"));
  const std::string even = kLab.answer(results_of(2, 100, 60, 50), "distributed");
  EXPECT_TRUE(mentions(even, "block of each batch of 64 rows: 32 rows each. ")) << even;
  EXPECT_TRUE(mentions(even, "All 2 losses equal those of one device")) << even;
  EXPECT_TRUE(mentions(kLab.answer(results_of(3, 100, 60, 50), "distributed"), "weighted by rows"));
}

TEST(Lab6Answers, CommunicationIsQuotedFromTheBuckets) {
  const std::string text = kLab.answer(results_of(2, 100, 60, 50), "When does");
  EXPECT_TRUE(mentions(text, "2 all-reduces of 16.0 MiB in all per step, each launched as soon as"))
      << text;
  EXPECT_TRUE(mentions(text, "launched 6.00 ms after backward began")) << text;
  EXPECT_TRUE(mentions(text, "1 of 2 buckets had finished")) << text;
  EXPECT_TRUE(mentions(text, "took 4.00 ms per step, of which 3.00 ms (75 %) was hidden")) << text;
  EXPECT_TRUE(mentions(text, "little but waiting can be hidden")) << "two cores: " << text;
  LabRuns gpus = results_of(2, 100, 60, 50);
  for (auto& run : gpus.sets["ddp"][1].runs) {
    for (auto& device : run.devices) {
      device.name = "cuda:0";
      device.physical = "GPU 0";
    }
  }
  EXPECT_FALSE(mentions(kLab.answer(gpus, "When does"), "little but waiting"));
}

TEST(Lab6Answers, BalanceIsMeasuredBothWays) {
  const std::string yes = kLab.answer(results_of(2, 100, 60, 50), "more balanced");
  EXPECT_TRUE(
      yes.starts_with("Yes. Device 0's peak was 1.50 times that of the other under DataParallel "
                      "and 1.00 times under DDP. The devices computed for 60 to 90 % of the time "
                      "under DataParallel and for 95 % under DDP."))
      << yes;
  LabRuns uneven = results_of(2, 100, 60, 50);
  for (auto& run : uneven.sets["ddp"][1].runs) {
    run.devices[0].peak_bytes = 60_MiB;
    run.devices[1].busy_fraction = 0.1;
  }
  EXPECT_TRUE(kLab.answer(uneven, "more balanced").starts_with("Not in this run."));
  EXPECT_TRUE(kLab.answer(uneven, "bottleneck").starts_with("It still holds more in this run."));
  const std::string no = kLab.answer(results_of(2, 100, 60, 50), "bottleneck");
  EXPECT_TRUE(
      no.starts_with("No. At its peak it held 10.0 MiB more than the other under "
                     "DataParallel and as much as the other under DDP;"))
      << no;
  EXPECT_TRUE(mentions(no, "moved 20.0 MiB per step under DataParallel and 16.0 MiB under DDP"))
      << no;
}

TEST(Lab6Answers, FasterBothWaysAndNeither) {
  EXPECT_TRUE(
      kLab.answer(results_of(2, 100, 60, 50), "is faster")
          .starts_with("DDP. On 2 devices a step took 50.0 ± 0.0 ms with DDP and 60.0 ± 0.0 "
                       "ms with DataParallel: 1.20 ± 0.00 times as fast."));
  EXPECT_TRUE(kLab.answer(results_of(2, 100, 50, 60), "is faster").starts_with("DataParallel. "));
  EXPECT_TRUE(kLab.answer(results_of(2, 100, 50, 50.5), "is faster").starts_with("Neither"));
  LabRuns noisy = results_of(2, 100, 60, 57);
  noisy.sets["ddp"][1].runs = {ddp_run(2, 55), ddp_run(2, 58), ddp_run(2, 60.5)};
  EXPECT_TRUE(kLab.answer(noisy, "is faster").starts_with("Neither")) << "within the deviation";
}

TEST(Lab6Answers, ScalingIsMeasuredAndSharedCoresAreNotSoldAsIt) {
  const std::string ddp = kLab.answer(results_of(2, 100, 80, 50), "scales");
  EXPECT_TRUE(
      ddp.starts_with("DDP. Against itself on one device DDP reached 2.00 ± 0.00 times on 2 (100 "
                      "% of proportional) and DataParallel 1.25 ± 0.00 times (62 %)."))
      << ddp;
  EXPECT_TRUE(
      kLab.answer(results_of(2, 100, 50, 80), "scales").starts_with("In this run DataParallel."));
  EXPECT_TRUE(mentions(kLab.answer(results_of(2, 100, 90, 90, 2), "scales"),
                       "This run cannot show it, because the devices share hardware."));
  LabRuns four = results_of(2, 100, 80, 50);
  four.sets["dp"].push_back(set_of(dp_run(4, 90, 4)));
  four.sets["ddp"].push_back(set_of(ddp_run(4, 60, 4)));
  const std::string text = kLab.answer(four, "scales");
  EXPECT_TRUE(mentions(text, "The 4 ranks of the largest run shared this machine's cores")) << text;
  EXPECT_TRUE(
      mentions(text, "DDP reached 2.00 times on 2 and 1.67 times on 4 that share hardware;"))
      << text;
}

TEST(Lab6Answers, OneRankCannotShowIt) {
  for (const char* question : {"When does", "more balanced", "bottleneck", "scales", "Why?"}) {
    EXPECT_TRUE(mentions(kLab.answer(results_of(1, 100, 0, 0), question), "This run had one rank"))
        << question;
  }
}

TEST(Lab6Charts, BothMethodsStandSideBySide) {
  const auto figures = kLab.report(results_of(2, 100, 60, 50)).figures;
  const auto& chart = std::get<BarChart>(figures[0].chart);
  EXPECT_EQ(chart.categories, (std::vector<std::string>{"1 device", "2 devices"}));
  EXPECT_EQ(chart.series[0].values, (std::vector<double>{100, 60}));
  EXPECT_EQ(chart.series[1].values, (std::vector<double>{100, 50}));
}

TEST(Lab6Charts, BucketsAreDrawnAgainstBackward) {
  LabRuns results = results_of(2, 100, 60, 50);
  RunRecord& run = results.sets["ddp"][1].runs.front();
  run.backward_ms = 20;
  run.buckets = {
      {.index = 0, .bytes = 1_MiB, .parameters = 1, .launched_ms = 2, .finished_ms = 9},
      {.index = 1, .bytes = 2_MiB, .parameters = 1, .launched_ms = 8, .finished_ms = 25}};
  const auto chart = std::get<Timeline>(kLab.report(results).figures.back().chart);
  ASSERT_EQ(chart.rows.size(), 3U);
  EXPECT_EQ(chart.rows[0].spans[0].end_ms, 20);
  EXPECT_EQ(chart.rows[2].label, "bucket 1");
  EXPECT_TRUE(mentions(kLab.report(results).figures.back().caption, "1 of 2 buckets had finished"));

  run.buckets.clear();
  for (int i = 0; i < 20; ++i) {  // in pairs that overlap
    run.buckets.push_back({.index = i,
                           .bytes = 1_MiB,
                           .parameters = 1,
                           .launched_ms = 1.0 * i,
                           .finished_ms = i + 1.5});
  }
  EXPECT_EQ(std::get<Timeline>(kLab.report(results).figures.back().chart).rows.size(), 3U)
      << "packed";
  run.buckets.clear();
  EXPECT_EQ(kLab.report(results).figures.size(), 2U) << "nothing was communicated";
}

TEST(Lab6Report, HoldsStampTablesAnswersAndRecords) {
  const std::string report = render_markdown(lab_document(
      kLab.report(results_of(2, 100, 60, 50)), "lockstep lab 6", 1767323040, {"ddp-cpu2"}));
  for (const char* part :
       {"# Practical 6: DistributedDataParallel", "- command: `lockstep lab 6`",
        "- libtorch: 2.11.0", "### DataParallel against DDP on 2 devices", "### All set-ups",
        "### Balance", "### Overlap", "### Communication per step", "### Scaling",
        "Which of the two is faster?** DDP.", "[ddp-cpu2](records/ddp-cpu2.json)"}) {
    EXPECT_TRUE(mentions(report, part)) << part;
  }
}

TEST(Lab6Report, NamesWhatAnIncompleteFolderLacks) {
  kLab.expect_missing_runs_are_named(results_of(2, 100, 60, 50));
}

}  // namespace
}  // namespace lockstep::cli::lab6_test
