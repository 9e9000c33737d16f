#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_report.hpp"
#include "cli/lab/lab_text.hpp"
#include "lab_support.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "lockstep/units.hpp"

namespace lockstep::cli::lab5_test {
namespace {

using test::cores;
using test::mentions;

const test::LabOf kLab{"5"};

// A made-up run: `devices` logical devices, each step `ms` long.
RunRecord run_of(int devices, double ms, int shared_by = 1, int64_t rows = 64) {
  RunRecord record;
  record.host = {{"name", "box"}};
  record.versions = {{"libtorch", "2.11.0"}};
  record.split = chunk_rows(rows, devices);
  record.effective_batch = rows;
  record.step_ms = {
      .mean = ms, .stddev = 0, .median = ms, .p95 = ms, .min = ms, .max = ms, .n = 10};
  record.warmup_steps = 2;
  record.total_s = ms * 10 / 1000;
  record.losses = {1.0, 0.5};
  for (int i = 0; i < devices; ++i) {
    const bool first = i == 0;
    record.devices.push_back(
        {.name = "cpu:" + std::to_string(i),
         .physical = shared_by > 1 ? "all cores, shared" : "core " + std::to_string(i),
         .shared_by = shared_by,
         .threads = 1,
         .peak_bytes = first ? 30_MiB : 20_MiB,
         .final_bytes = first ? 24_MiB : 12_MiB,
         .busy_fraction = 0.9,
         .sent_bytes_per_step = first ? (devices - 1) * 10_MiB : 10_MiB,
         .received_bytes_per_step = first ? (devices - 1) * 10_MiB : 10_MiB});
  }
  return record;
}

RunSet split_of(int64_t rows, int devices) {
  return {devices, {run_of(devices, 1, 1, rows)}};
}

// Three repetitions on one device and on `devices`, with these step times.
LabRuns results_of(int devices, double single_ms, double parallel_ms, int shared_by = 1) {
  LabRuns results;
  results.sets["single"] = {{1, std::vector<RunRecord>(3, run_of(1, single_ms)), 1}};
  results.sets["dp"] = {
      {devices, std::vector<RunRecord>(3, run_of(devices, parallel_ms, shared_by)), devices}};
  results.sets["split"] = {split_of(64, 2), split_of(64, 3), split_of(64, 5)};
  return results;
}

bool starts(const std::string& text, const std::string& part) {
  return text.rfind(part, 0) == 0;
}

TEST(Lab5Plan, InterleavesRepetitionsAndGivesRecordsNamesOfTheirOwn) {
  const LabPlan plan = kLab.plan({.devices = "cpu:2"}, cores(2));
  std::vector<std::string> names;
  for (const auto& experiment : plan.experiments) names.push_back(experiment.name);
  ASSERT_GE(names.size(), 6U);
  EXPECT_EQ(names[0], "single-cpu2-run1");
  EXPECT_EQ(names[1], "dp-cpu1-run1");
  EXPECT_EQ(names[2], "dp-cpu2-run1");
  EXPECT_EQ(names[3], "single-cpu2-run2");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
  EXPECT_EQ(plan.experiments.size(), 3U * 3U + 3U);
}

TEST(Lab5Plan, FewerDevicesGetOnlyTheirShareOfTheCores) {
  const auto cores_of = [](const LabPlan& plan, const std::string& name) {
    for (const auto& experiment : plan.experiments) {
      if (experiment.name == name) return experiment.cores;
    }
    return std::vector<int>{-1};
  };
  const LabPlan own = kLab.plan({.devices = "cpu:2"}, cores(8));
  EXPECT_EQ(cores_of(own, "dp-cpu1-run1"), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(cores_of(own, "dp-cpu2-run1"), std::vector<int>{}) << "all";
  const LabPlan shared = kLab.plan({.devices = "cpu:4"}, cores(2));
  EXPECT_EQ(cores_of(shared, "dp-cpu1-run1"), (std::vector<int>{0}));
  EXPECT_EQ(cores_of(shared, "dp-cpu3-run1"), (std::vector<int>{0, 1}));
}

TEST(Lab5Plan, SplitsAreTheCoursesAndThoseAskedFor) {
  const auto pairs_of = [](const LabOptions& options) {
    std::vector<std::pair<int64_t, int>> pairs;
    for (const auto& experiment : kLab.plan(options, cores(2)).experiments) {
      if (experiment.keys[0].what != "split") continue;
      pairs.emplace_back(std::stoll(test::value_of(experiment, "--batch")), experiment.devices);
    }
    return pairs;
  };
  using Pairs = std::vector<std::pair<int64_t, int>>;
  EXPECT_EQ(pairs_of({}), (Pairs{{64, 2}, {64, 3}, {64, 5}}));
  EXPECT_EQ(pairs_of({.own = {{"--split-devices", "5,7"}}}),
            (Pairs{{64, 2}, {64, 3}, {64, 5}, {64, 7}}));
  EXPECT_EQ(pairs_of({.own = {{"--split-rows", "9"}, {"--split-devices", "4"}}}),
            (Pairs{{64, 2}, {64, 3}, {64, 5}, {9, 4}}));
  EXPECT_EQ(pairs_of({.own = {{"--split-rows", "9"}}}),
            (Pairs{{64, 2}, {64, 3}, {64, 5}, {9, 2}, {9, 3}, {9, 5}}));
}

TEST(Lab5Plan, SizesGivenReplaceTheDefaults) {
  const LabPlan plan = kLab.plan({.devices = "cpu:2", .steps = 7, .batch = 33}, cores(2));
  const auto& arguments = plan.experiments[0].arguments;
  const auto value_of = [&](const std::string& flag) {
    return *(std::find(arguments.begin(), arguments.end(), flag) + 1);
  };
  EXPECT_EQ(value_of("--steps"), "7");
  EXPECT_EQ(value_of("--batch"), "33");
  EXPECT_EQ(kLab.plan({.quick = true}, cores(2)).repetitions, 2);
}

TEST(Lab5Plan, ComparesMethodsWithoutCapturedStepsOnGpus) {
  const auto captures = [](const Experiment& experiment) {
    const auto& flags = experiment.arguments;
    const auto flag = std::find(flags.begin(), flags.end(), "--capture");
    return flag == flags.end() ? "" : *(flag + 1);
  };
  for (const auto& experiment : kLab.plan({.devices = "cuda:0*2"}, cores(4, 1)).experiments) {
    if (experiment.keys[0].what == "split") continue;
    EXPECT_EQ(captures(experiment), "off") << experiment.name;
  }
  EXPECT_EQ(captures(kLab.plan({.devices = "cpu:2"}, cores(2)).experiments[0]), "");
}

TEST(Lab5Plan, RefusesDevicesThatAreNotThere) {
  EXPECT_THROW(kLab.plan({.devices = "cuda:0*2"}, cores(2)), Error);
}

TEST(Lab5Results, PoolsStepsExactly) {
  const std::vector<double> a = {10, 12, 14};
  const std::vector<double> b = {20, 22};
  const std::vector<double> all = {10, 12, 14, 20, 22};
  RunSet set_up{1, {run_of(1, 0), run_of(1, 0)}};
  set_up.runs[0].step_ms = summarize(a);
  set_up.runs[1].step_ms = summarize(b);
  const Stats pooled = pooled_step_ms(set_up);
  const Stats expected = summarize(all);
  EXPECT_DOUBLE_EQ(pooled.mean, expected.mean);
  EXPECT_DOUBLE_EQ(pooled.stddev, expected.stddev);
  EXPECT_EQ(pooled.min, 10);
  EXPECT_EQ(pooled.max, 22);
  EXPECT_EQ(pooled.n, 5);
}

TEST(Lab5Results, ComparesRepetitionByRepetition) {
  RunSet single{1, {run_of(1, 100), run_of(1, 200)}};
  RunSet parallel{2, {run_of(2, 50), run_of(2, 100)}};
  const Comparison comparison = compare(single, parallel);
  EXPECT_DOUBLE_EQ(comparison.speedup.mean, 2) << "the machine slowed down for both";
  EXPECT_DOUBLE_EQ(comparison.efficiency, 1);
  EXPECT_TRUE(comparison.unsafe) << "but step times doubled between runs";
  EXPECT_FALSE(
      compare({1, {run_of(1, 100), run_of(1, 101)}}, {2, {run_of(2, 50), run_of(2, 51)}}).unsafe);
}

TEST(Lab5Results, SpeedupsOnBothSidesOfOneAreUnsafe) {
  const RunSet single{1, {run_of(1, 100), run_of(1, 100)}};
  const RunSet parallel{2, {run_of(2, 92), run_of(2, 106)}};
  EXPECT_LT(compare(single, parallel).noise, 0.101);
  EXPECT_TRUE(compare(single, parallel).unsafe);
}

TEST(Lab5Results, CollectsRecordsToTheirSetUps) {
  const auto plan = kLab.plan({.devices = "cpu:2", .quick = true}, cores(2));
  LabRuns results;
  for (const auto& experiment : plan.experiments) {
    results.add(experiment, run_of(experiment.devices, 1));
  }
  EXPECT_EQ(results.of("single").runs.size(), 2U);
  ASSERT_EQ(results.all("dp").size(), 2U);
  EXPECT_EQ(results.all("dp").back().devices, 2);
  EXPECT_EQ(results.all("dp").back().runs.size(), 2U);
  EXPECT_EQ(results.all("split").size(), 3U);
}

TEST(Lab5Tables, SpeedRowsSayWhetherItIsProportional) {
  const auto proportional = [](const LabRuns& results) {
    return kLab.table(results, "speed").rows().back().back();
  };
  EXPECT_EQ(proportional(results_of(2, 100, 52)), "96 %, yes");
  EXPECT_EQ(proportional(results_of(4, 100, 50)), "50 %, no");
  EXPECT_EQ(proportional(results_of(2, 100, 150)), "33 %, no");
  EXPECT_EQ(proportional(results_of(3, 100, 90, 3)), "cannot tell");
  EXPECT_EQ(proportional(results_of(1, 100, 101)), "—");
}

TEST(Lab5Tables, SharedDevicesAreLabelledInEveryTable) {
  const LabRuns results = results_of(3, 100, 90, 3);
  EXPECT_EQ(kLab.table(results, "speed").rows().back()[1], "3, shared");
  EXPECT_EQ(kLab.table(results, "memory").rows().back()[2], "all cores, shared by 3");
  EXPECT_EQ(kLab.table(results, "bottleneck").rows().back()[1], "all cores, shared by 3");
}

TEST(Lab5Tables, TimesAreInSecondsAsThePageAsks) {
  const Table table = kLab.table(results_of(2, 100, 60), "speed");
  ASSERT_EQ(table.columns().size(), 6U);
  EXPECT_EQ(table.columns()[2].header, "step time (s)");
  EXPECT_EQ(table.columns()[3].header, "total (s)");
  EXPECT_EQ(table.rows()[0][2], "0.100 ± 0.000");
  EXPECT_EQ(table.rows()[1][2], "0.0600 ± 0.0000");
  EXPECT_EQ(table.rows()[0][3], "1.00");
  EXPECT_TRUE(mentions(table.notes().back(), "1.67 times as fast as one device"));
}

TEST(Lab5Tables, FitATerminalOf80Columns) {
  LabRuns results = results_of(2, 100, 60);
  for (auto& set_up : results.sets["split"])
    set_up.runs[0].replicas = {{"cpu:0", {32, 16}, {32, 16}}};
  for (const auto& [name, table] : kLab.report(results).tables) {
    EXPECT_LE(test::width_of(table), 80U) << table.terminal(false);
  }
}

TEST(Lab5Tables, ShapesAreThoseSeenInsideTheModel) {
  LabRuns results = results_of(2, 100, 60);
  EXPECT_EQ(kLab.table(results, "shapes").title(), "no such table") << "nothing was recorded";
  results.sets["split"][1].runs[0].replicas = {
      {"cpu:0", {22, 16}, {22, 16}}, {"cpu:1", {22, 16}, {22, 16}}, {"cpu:2", {20, 16}, {20, 8}}};
  const auto rows = kLab.table(results, "shapes").rows();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[2], (std::vector<std::string>{"64", "3", "cpu:2", "[20, 16]", "[20, 8]"}));
}

TEST(Lab5Tables, OneWarmUpStepIsNotSeveral) {
  LabRuns results = results_of(2, 100, 60);
  for (auto& run : results.sets["single"][0].runs) run.warmup_steps = 1;
  EXPECT_TRUE(mentions(kLab.table(results, "speed").notes().front(),
                       "1 warm-up step per run is left out."));
}

TEST(Lab5Tables, TimeWithoutACoreIsNotWaiting) {
  LabRuns results = results_of(2, 100, 60);
  EXPECT_FALSE(mentions(kLab.table(results, "bottleneck").terminal(false), "no core"));
  for (auto& run : results.sets["dp"][0].runs) {
    for (auto& device : run.devices) device.queued_fraction = 0.03;
  }
  const Table table = kLab.table(results, "bottleneck");
  EXPECT_EQ(table.columns()[4].header, "no core");
  EXPECT_EQ(table.rows()[0][4], "3 %");
  EXPECT_TRUE(mentions(table.terminal(false), "Busy: processor time."));
  EXPECT_FALSE(mentions(kLab.table(results_of(3, 100, 90, 3), "bottleneck").terminal(false),
                        "count as busy"))
      << "on cores, waiting is not busy";
}

TEST(Lab5Tables, MemoryDifferencesToDevice0AreSigned) {
  const auto rows = kLab.table(results_of(2, 100, 60), "memory").rows();
  EXPECT_EQ(rows[2][5], "-10.0 MiB");
  EXPECT_EQ(rows[2][6], "-12.0 MiB");
}

TEST(Lab5Tables, SplitsStandBesideTheRule) {
  LabRuns results = results_of(2, 100, 60);
  results.sets["split"] = {split_of(64, 2), split_of(64, 3), split_of(9, 4), split_of(64, 5)};
  results.sets["split"][3].runs[0].split = {12, 13, 13, 13, 13};
  const auto rows = kLab.table(results, "split").rows();
  EXPECT_EQ(rows[0][3], "32 32");
  EXPECT_EQ(rows[0].back(), "equal");
  EXPECT_EQ(rows[1][3], "22 22 20");
  EXPECT_EQ(rows[1].back(), "uneven");
  EXPECT_EQ(rows[2][2], "3");
  EXPECT_EQ(rows[2].back(), "equal, some idle");
  EXPECT_EQ(rows[3][5], "DIFFERS: 13 13 13 13 12");
}

TEST(Lab5Answers, EveryQuestionOfThePracticalIsAnswered) {
  for (const auto& results :
       {results_of(2, 100, 60), results_of(3, 100, 130, 3), results_of(1, 9, 9)}) {
    const auto answers = kLab.report(results).answers;
    EXPECT_EQ(answers.size(), 12U);
    for (const auto& answer : answers) {
      EXPECT_NE(answer.text, "") << answer.question;
      EXPECT_TRUE(answer.text.ends_with(".")) << answer.text;
      EXPECT_FALSE(mentions(answer.text, "nan")) << answer.text;
      EXPECT_FALSE(mentions(answer.text, "inf ")) << answer.text;
    }
  }
}

TEST(Lab5Answers, FasterBothWays) {
  const std::string yes = kLab.answer(results_of(2, 100, 60), "faster");
  EXPECT_TRUE(starts(yes,
                     "Yes. A step took 60.0 ± 0.0 ms on 2 devices and 100 ± 0 ms on one: 1.67 ± "
                     "0.00 times as fast"))
      << yes;
  const std::string no = kLab.answer(results_of(2, 100, 150), "faster");
  EXPECT_TRUE(starts(no, "No. ")) << no;
  EXPECT_TRUE(mentions(no, "1.50 times slower")) << no;
  EXPECT_TRUE(starts(kLab.answer(results_of(2, 100, 99), "faster"), "Not measurably."));
}

TEST(Lab5Answers, ADifferenceWithinTheDeviationIsNone) {
  LabRuns results = results_of(2, 100, 95);
  results.sets["dp"][0].runs = {run_of(2, 92), run_of(2, 95), run_of(2, 101)};
  const std::string text = kLab.answer(results, "faster");
  EXPECT_TRUE(starts(text, "Not measurably.")) << text;
  EXPECT_FALSE(mentions(text, "because")) << text;
  EXPECT_TRUE(mentions(kLab.answer(results, "proportional"), "no speed-up at all (1.04 ± 0.05)"));
}

// What a run says whose times cannot be judged: once, at the top, and no cause anywhere.
void expect_not_judged(const LabRuns& results, const std::string& reason) {
  const LabReport report = kLab.report(results);
  EXPECT_TRUE(mentions(report.warning, "The times in this report cannot be judged: " + reason))
      << report.warning;
  EXPECT_TRUE(starts(kLab.answer(results, "faster"), "That cannot be judged from this run."));
  EXPECT_TRUE(starts(kLab.answer(results, "proportional"), "That cannot be judged from this run"));
  for (const auto& answer : report.answers) {
    for (const char* part : {"ther programs", "proves little", "rough figure", "Amdahl", "idle",
                             "times slower", "times as fast", "waited", "busy machine"}) {
      EXPECT_FALSE(mentions(answer.text, part)) << answer.text;
    }
  }
  for (const auto& [name, table] : report.tables) {
    EXPECT_FALSE(mentions(table.terminal(false), "Warning")) << name;
    EXPECT_FALSE(mentions(table.terminal(false), "times slower")) << name;
    EXPECT_FALSE(mentions(table.terminal(false), "proportional?")) << name;
  }
}

TEST(Lab5Answers, ABusyMachineIsToldOnceAndNoCauseIsNamed) {
  LabRuns results = results_of(2, 100, 150);
  results.others_busy_cores = 0.05;
  EXPECT_EQ(kLab.report(results).warning, "");
  results.others_busy_cores = 1.5;
  expect_not_judged(results, "other programs kept 1.5 cores busy when the lab began");
}

TEST(Lab5Answers, TimeWithoutACoreDecidesWhetherTheMachineWasBusy) {
  LabRuns results = results_of(2, 100, 60);
  results.others_busy_cores = 1.5;  // of more cores than these runs need
  const auto queue = [&results](double fraction) {
    for (auto& run : results.sets["dp"][0].runs) run.devices[1].queued_fraction = fraction;
  };
  queue(0.01);
  EXPECT_EQ(kLab.report(results).warning, "") << "the devices had their cores";
  queue(0.3);
  expect_not_judged(results, "devices were ready to compute but had no core for up to 30 %");
  for (auto& run : results.sets["dp"][0].runs) {
    for (auto& device : run.devices) device.shared_by = 2;
  }
  results.others_busy_cores = 0;
  EXPECT_EQ(kLab.report(results).warning, "") << "devices that share cores wait for each other";
}

TEST(Lab5Answers, RunsThatVaryTooMuchAreNotJudged) {
  LabRuns results = results_of(2, 100, 95);
  results.sets["dp"][0].runs = {run_of(2, 70), run_of(2, 95), run_of(2, 120)};
  expect_not_judged(results, "step times of the same set-up varied by 26 % between runs");
}

TEST(Lab5Answers, WaitingIsWhatIsNeitherComputingNorWithoutACore) {
  LabRuns results = results_of(2, 100, 60);
  EXPECT_FALSE(mentions(kLab.answer(results, "bottleneck be"), "waited")) << "cannot be told";
  for (auto& run : results.sets["dp"][0].runs) {
    for (auto& device : run.devices) device.queued_fraction = 0.04;
  }
  const std::string text = kLab.answer(results, "bottleneck be");
  EXPECT_TRUE(mentions(text, "For 6 % of the time the devices waited for each other")) << text;
  EXPECT_TRUE(mentions(text, "For up to 4 % they were ready but had no core.")) << text;
}

TEST(Lab5Answers, SharedHardwareIsNeverSoldAsScaling) {
  const LabRuns results = results_of(3, 100, 90, 3);
  const std::string remark = "All 3 devices share the same hardware here (all cores, shared)";
  EXPECT_TRUE(mentions(kLab.answer(results, "faster"), remark));
  EXPECT_TRUE(mentions(kLab.answer(results, "proportional"),
                       "This run cannot show it, because the devices share hardware"));
  int said = 0;
  for (const auto& answer : kLab.report(results).answers) {
    if (mentions(answer.text, remark)) ++said;
  }
  EXPECT_EQ(said, 1) << "once is enough";
  EXPECT_FALSE(mentions(kLab.answer(results, "proportional"), "% of proportional"));
  EXPECT_FALSE(mentions(kLab.answer(results, "not scale"), "Amdahl"));
}

TEST(Lab5Answers, OneDeviceCannotShowIt) {
  for (const char* question : {"faster", "proportional", "device 0 more", "equally", "not scale"}) {
    const std::string text = kLab.answer(results_of(1, 100, 100), question);
    EXPECT_TRUE(mentions(text, "This run had one device")) << text;
  }
}

TEST(Lab5Answers, ProportionalityIsMeasured) {
  EXPECT_TRUE(starts(kLab.answer(results_of(2, 100, 52), "proportional"),
                     "Nearly: 1.92 ± 0.00 times on 2 devices is 96 % of proportional"));
  const std::string no = kLab.answer(results_of(4, 100, 40), "proportional");
  EXPECT_TRUE(starts(no, "No: 2.50 ± 0.00 times on 4 devices is 62 % of proportional, as if 20 %"))
      << no;
  EXPECT_TRUE(starts(kLab.answer(results_of(2, 100, 120), "proportional"),
                     "No: 2 devices gave no speed-up at all (0.83 ± 0.00)"));
  EXPECT_TRUE(starts(kLab.answer(results_of(2, 100, 40), "proportional"), "More than that: 2.50"));
}

TEST(Lab5Answers, AmdahlLimitComesFromTheMeasuredSpeedup) {
  // Speed-up 2.5 on 4: a fifth of the step is serial, so 5 is the limit.
  EXPECT_TRUE(mentions(
      kLab.answer(results_of(4, 100, 40), "not scale"),
      "If 20 % of this step is not divided, as the measured speed-up suggests, no number of "
      "devices can exceed 5.0 times"));
}

TEST(Lab5Answers, GrowthOverDeviceCountsIsQuoted) {
  LabRuns results = results_of(2, 100, 50);
  results.sets["dp"].insert(results.sets["dp"].begin(), RunSet{1, {run_of(1, 100)}, 1});
  EXPECT_TRUE(mentions(kLab.answer(results, "proportional"),
                       "With 1 and 2 devices DataParallel ran 1.00 and 2.00 times as fast"));
}

TEST(Lab5Answers, MemoryIsComparedWithTheSingleDevice) {
  const std::string text = kLab.answer(results_of(3, 100, 50), "memory differ");
  EXPECT_TRUE(mentions(text, "The single device peaked at 30.0 MiB")) << text;
  EXPECT_TRUE(mentions(text, "device 0 peaked at 30.0 MiB and the others at 20.0 MiB on average"))
      << text;
  EXPECT_TRUE(mentions(text, "together 70.0 MiB, which is 2.33 times")) << text;
}

TEST(Lab5Answers, Device0LoadBothWays) {
  const std::string yes = kLab.answer(results_of(3, 100, 50), "device 0 more");
  EXPECT_TRUE(starts(yes, "Yes. Its memory peaked at 30.0 MiB, 10.0 MiB more than the others"))
      << yes;
  EXPECT_TRUE(mentions(yes, "it moved 40.0 MiB per step against 20.0 MiB on the others")) << yes;
  LabRuns even = results_of(2, 100, 50);
  for (auto& run : even.sets["dp"][0].runs) run.devices[1] = run.devices[0];
  EXPECT_TRUE(starts(kLab.answer(even, "device 0 more"), "Not in this run."));
  EXPECT_TRUE(mentions(kLab.answer(even, "equally"), "In memory and traffic they are equal too."));
}

TEST(Lab5Answers, OfTwoDevicesBothMoveTheSame) {
  const LabRuns results = results_of(2, 100, 50);
  const std::string loaded = kLab.answer(results, "device 0 more");
  EXPECT_TRUE(starts(loaded,
                     "Yes, in memory. Its memory peaked at 30.0 MiB, 10.0 MiB more than "
                     "the other. In traffic, it moved as much as the other, 20.0 MiB"))
      << loaded;
  const std::string use = kLab.answer(results, "equally");
  EXPECT_TRUE(mentions(use, "In memory they are not: device 0 held 10.0 MiB more")) << use;
  EXPECT_TRUE(mentions(use, "In traffic they are: 20.0 MiB per step.")) << use;
  EXPECT_FALSE(mentions(use, "memory and traffic they are not")) << use;
  EXPECT_TRUE(mentions(kLab.answer(results_of(3, 100, 50), "equally"),
                       "In memory and traffic they are not: device 0 held 10.0 MiB more at its "
                       "peak, and moved 40.0 MiB per step against 20.0 MiB on the others"));
}

TEST(Lab5Answers, UseIsEqualOrNot) {
  EXPECT_TRUE(starts(kLab.answer(results_of(2, 100, 50), "equally"), "In computing time, nearly."));
  LabRuns lazy = results_of(2, 100, 50);
  for (auto& run : lazy.sets["dp"][0].runs) run.devices[1].busy_fraction = 0.3;
  EXPECT_TRUE(starts(kLab.answer(lazy, "equally"),
                     "No. The devices computed for this share of the time: cpu:0 90 % and cpu:1 30 "
                     "%."));
  EXPECT_TRUE(
      mentions(kLab.answer(results_of(3, 100, 50), "equally"), "They had 22, 22 and 20 rows"));
  LabRuns idle = results_of(4, 100, 50);
  for (auto& run : idle.sets["dp"][0].runs) run.split = {3, 3, 3};
  EXPECT_TRUE(mentions(kLab.answer(idle, "equally"), "Only 3 of 4 devices got rows at all"));
  EXPECT_FALSE(mentions(kLab.answer(results_of(3, 100, 90, 3), "equally"), "counts as"))
      << "waiting for a core is not computing";
  LabRuns gpus = results_of(2, 100, 90, 2);
  for (auto& run : gpus.sets["dp"][0].runs) {
    for (auto& device : run.devices) {
      device.name = "cuda:0";
      device.physical = "GPU 0";
    }
  }
  EXPECT_TRUE(mentions(kLab.answer(gpus, "equally"), "On a shared GPU, waiting for it counts"));
}

TEST(Lab5Answers, SplitsAreQuotedAndABrokenRuleIsTold) {
  LabRuns results = results_of(2, 100, 50);
  results.sets["split"].push_back(split_of(9, 4));
  EXPECT_TRUE(mentions(kLab.answer(results, "divide it"),
                       "64 rows over 3 devices gave 22, 22 and 20 rows"));
  const std::string even = kLab.answer(results, "equal, when");
  EXPECT_TRUE(mentions(even, "Here equal: 64 over 2.")) << even;
  EXPECT_TRUE(mentions(even,
                       "Uneven: 64 over 3 (22, 22 and 20 rows), 64 over 5 (13, 13, 13, 13 and 12 "
                       "rows)."))
      << even;
  EXPECT_TRUE(mentions(even, "Rows ran out early: 9 over 4 (only 3 used).")) << even;
  results.sets["split"][0].runs[0].split = {40, 24};
  EXPECT_TRUE(mentions(kLab.answer(results, "divide it"),
                       "broke the rule: 64 rows over 2 devices gave 40 and 24 rows"));
}

TEST(Lab5Answers, LossesAreComparedWithTheSingleDevice) {
  LabRuns results = results_of(2, 100, 50);
  EXPECT_TRUE(mentions(kLab.answer(results, "advantage"), "All 2 losses equal"));
  results.sets["dp"][0].runs[0].losses = {1.0, 0.5000001};
  const std::string rounded = kLab.answer(results, "advantage");
  EXPECT_TRUE(mentions(rounded, "by less than 0.001 %, which is rounding.")) << rounded;
  EXPECT_FALSE(mentions(rounded, "e-0")) << rounded;
  results.sets["dp"][0].runs[0].losses = {1.0, 0.6};
  const std::string wrong = kLab.answer(results, "advantage");
  EXPECT_TRUE(mentions(wrong, "by at most 20 %")) << wrong;
  EXPECT_FALSE(mentions(wrong, "rounding")) << wrong;
  results.sets["dp"][0].runs[0].losses = {1.0, std::nan("")};
  EXPECT_TRUE(mentions(kLab.answer(results, "advantage"), "did not stay finite"));
}

TEST(Lab5Answers, CommunicationIsQuotedWhereItWasMeasured) {
  LabRuns results = results_of(2, 100, 50);
  EXPECT_FALSE(mentions(kLab.answer(results, "bottleneck be"), "Moving data took"));
  results.sets["dp"][0].runs[0].comm_ms = 10;
  EXPECT_TRUE(mentions(kLab.answer(results, "bottleneck be"),
                       "Moving data took 10.0 ms of a 50.0 ms step (20 %)"));
}

TEST(Lab5Charts, StepTimesStandBesideTheIdeal) {
  const auto figures = kLab.report(results_of(2, 100, 60)).figures;
  ASSERT_EQ(figures.size(), 2U);
  const auto& chart = std::get<LineChart>(figures[0].chart);
  ASSERT_EQ(chart.series.size(), 3U);
  EXPECT_EQ(chart.series[1].y, std::vector<double>{60});
  EXPECT_EQ(chart.series[2].y, (std::vector<double>{100, 50}));
  EXPECT_TRUE(chart.series[2].reference);
  EXPECT_TRUE(mentions(figures[0].caption, "took 60.0 ms where the ideal is 50.0 ms"));
}

TEST(Lab5Charts, EveryDeviceHasABar) {
  const auto chart = std::get<BarChart>(kLab.report(results_of(3, 100, 60)).figures[1].chart);
  EXPECT_EQ(chart.categories, (std::vector<std::string>{"cpu:0", "cpu:1", "cpu:2"}));
  EXPECT_TRUE(std::isnan(chart.series[0].values[1])) << "the single device has no device 1";
  EXPECT_EQ(chart.series[1].values[1], static_cast<double>(20_MiB));
}

TEST(Lab5Report, SaysWhatWasTrainedAndHowToRepeatIt) {
  LabRuns results = results_of(2, 100, 60);
  results.options.quick = true;
  results.options.own = {{"--split-rows", "9"}};
  for (auto& run : results.sets["dp"][0].runs) {
    run.model = {
        .description = "mlp of 4 linear layers", .parameters = 4198400, .dtype = "float32"};
    run.options = {{"steps", "12"},      {"batch", "64"},      {"dim", "8"},  {"hidden", "16"},
                   {"depth", "2"},       {"devices", "cpu:2"}, {"seed", "0"}, {"lr", "0.5"},
                   {"optimizer", "sgd"}, {"data", ""}};
  }
  const LabFacts expected = {
      {"model", "mlp of 4 linear layers"},
      {"weights", "4,198,400"},
      {"precision", "float32"},
      {"batch", "64 rows per step"},
      {"steps", "12 per run: 2 to warm up, 10 measured; 3 runs"},
      {"optimizer", "sgd, learning rate 0.5"},
      {"seed", "0"},
      {"data", "batches generated from the seed"},
      {"devices", "cpu:0 (core 0), cpu:1 (core 1)"},
      {"command",
       "lockstep lab 5 --quick --devices cpu:2 --steps 12 --batch 64 --dim 8 --hidden 16 "
       "--depth 2 --split-rows 9"}};
  EXPECT_EQ(kLab.report(results).trained, expected);
}

TEST(Lab5Report, HoldsStampTablesAnswersAndRecords) {
  const std::string report = render_markdown(lab_document(
      kLab.report(results_of(2, 100, 60)), "lockstep lab 5", 1767323040, {"single-cpu2-run1"}));
  for (const char* part :
       {"- date: 2026-01-02 03:04 UTC", "- command: `lockstep lab 5`", "- host: box",
        "- libtorch: 2.11.0", "### Speed", "### Memory", "### How DataParallel divides",
        "### Where the load is", "Did training become faster?** Yes.",
        "[single-cpu2-run1](records/single-cpu2-run1.json)"}) {
    EXPECT_TRUE(mentions(report, part)) << part;
  }
}

TEST(Lab5Report, NamesWhatAnIncompleteFolderLacks) {
  kLab.expect_missing_runs_are_named(results_of(2, 100, 60));
}

}  // namespace
}  // namespace lockstep::cli::lab5_test
