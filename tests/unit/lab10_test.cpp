#include <gtest/gtest.h>

#include <set>

#include "cli/lab/pipeline_trace.hpp"
#include "lab10_support.hpp"
#include "support.hpp"

namespace lockstep::cli::lab10_test {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::first_program;
using test::made_lab10;
using test::mentions;
using test::names_of;
using test::row_with;
using test::set_up;
using test::value_of;
using Words = std::vector<std::string>;

const test::LabOf kLab{"10"};

TEST(Lab10Plan, QuickRunsEveryPartOnceAndTheSchedulesInTurns) {
  const LabPlan plan = kLab.plan({.quick = true}, cores(2));
  EXPECT_EQ(names_of(plan),
            (Words{"single", "base", "micro-batches-2", "micro-batches-8", "batch-32", "batch-128",
                   "one-process", "same-device", "sequential-run1", "gpipe-run1", "1f1b-run1",
                   "zero-bubble-run1", "sequential-run2", "gpipe-run2", "1f1b-run2",
                   "zero-bubble-run2"}));
  for (const auto& experiment : plan.experiments) {
    EXPECT_EQ(experiment.program, "practical10_hybrid") << experiment.name;
    EXPECT_TRUE(experiment.cores.empty()) << experiment.name;
  }
  EXPECT_EQ(kLab.plan({}, cores(2)).repetitions, 3);
}

TEST(Lab10Plan, FlagsSayWhatEachPartIs) {
  const LabPlan plan = kLab.plan({.quick = true, .steps = 3, .dim = 8}, cores(2));
  const auto tail = [&plan](const std::string& name) {
    const auto& words = experiment_named(plan, name).arguments;
    const auto quiet = std::find(words.begin(), words.end(), "--quiet");
    return quiet == words.end() ? words : Words(quiet + 1, words.end());
  };
  EXPECT_EQ(tail("single"),
            (Words{"--micro-batches", "1", "--stages", "1", "--schedule", "gpipe"}));
  EXPECT_EQ(tail("base"), (Words{"--micro-batches", "4", "--stages", "2", "--schedule", "gpipe"}));
  EXPECT_EQ(tail("same-device"), (Words{"--micro-batches", "4", "--stages", "2", "--schedule",
                                        "gpipe", "--place", "same"}));
  EXPECT_EQ(tail("1f1b-run2"),
            (Words{"--micro-batches", "8", "--stages", "2", "--schedule", "1f1b"}));
  const auto value = [&plan](const std::string& name, const std::string& flag) {
    return value_of(experiment_named(plan, name), flag);
  };
  EXPECT_EQ(value("base", "--batch"), "64");
  EXPECT_EQ(value("batch-128", "--batch"), "128");
  EXPECT_EQ(value("gpipe-run1", "--batch"), "512") << "64 rows in each micro-batch";
  EXPECT_EQ(value("base", "--steps"), "3");
  EXPECT_EQ(value("base", "--dim"), "8");
  EXPECT_EQ(value("base", "--devices"), "cpu:4");
  EXPECT_EQ(value("single", "--devices"), "cpu:1");
  EXPECT_EQ(value("one-process", "--devices"), "cpu:2");
  EXPECT_EQ(value("same-device", "--devices"), "cpu:4");
  EXPECT_EQ(experiment_named(plan, "base").ranks, 2);
  EXPECT_EQ(experiment_named(plan, "one-process").ranks, 1);
  EXPECT_EQ(experiment_named(plan, "gpipe-run1").ranks, 1);
}

TEST(Lab10Plan, ListsAndStagesAreThoseAskedFor) {
  const LabPlan plan =
      kLab.plan({.batch = 96,
                 .own = {{"--micro-batches", "6,3,3"}, {"--batches", "48,96"}, {"--stages", "3"}}},
                cores(2));
  const auto names = names_of(plan);
  EXPECT_EQ((Words{names.begin(), names.begin() + 6}),
            (Words{"single", "base", "micro-batches-6", "batch-48", "one-process", "same-device"}));
  const Experiment base = experiment_named(plan, "base");
  EXPECT_EQ(value_of(base, "--micro-batches"), "3") << "the first, where 4 is not among them";
  EXPECT_EQ(value_of(base, "--stages"), "3");
  EXPECT_EQ(value_of(base, "--depth"), "4") << "two layers in each stage";
  EXPECT_EQ(value_of(base, "--devices"), "cpu:6");
  EXPECT_EQ(value_of(experiment_named(plan, "gpipe-run3"), "--batch"), "576");
}

TEST(Lab10Plan, HardwareIsDividedIntoAsManyDevicesAsNeeded) {
  const auto devices = [](const LabOptions& options, int gpus, const std::string& name) {
    return value_of(experiment_named(kLab.plan(options, cores(8, gpus)), name), "--devices");
  };
  EXPECT_EQ(devices({.devices = "cpu:2"}, 1, "base"), "cpu:4");
  EXPECT_EQ(devices({}, 1, "base"), "cuda:0*4");
  EXPECT_EQ(devices({}, 1, "gpipe-run1"), "cuda:0*2");
  EXPECT_EQ(devices({}, 2, "base"), "cuda:0*2,1*2");
  EXPECT_EQ(devices({}, 2, "gpipe-run1"), "cuda:0,1");
  EXPECT_EQ(devices({}, 3, "base"), "cuda:0*2,1,2");
  EXPECT_EQ(devices({}, 8, "base"), "cuda:0,1,2,3");
  EXPECT_EQ(devices({.devices = "cuda:1*2"}, 2, "base"), "cuda:1*4");
}

TEST(Lab10Plan, BadValuesAreNamedWithARemedy) {
  expect_error(Code::kSplit, {"--batch 8", "2 ranks and 8 micro-batches", "larger --batch"},
               [] { kLab.plan({.batch = 8}, cores(2)); });
  expect_error(Code::kSplit, {"--batches 4", "larger --batches"}, [] {
    kLab.plan({.own = {{"--batches", "4,64"}}}, cores(2));
  });
  expect_error(Code::kUsage, {"--stages 6", "5 layers of --depth 1", "--depth 2 or more"}, [] {
    kLab.plan({.depth = 1, .own = {{"--stages", "6"}}}, cores(2));
  });
  EXPECT_NO_THROW(kLab.plan({.depth = 1, .own = {{"--stages", "5"}}}, cores(2)));
}

TEST(Lab10Results, CollectsEveryRecordToItsSetUp) {
  const LabRuns results = test::named_runs(kLab.plan({}, cores(2)));
  const auto first = [&results](const char* what) { return first_program(results.of(what)); };
  EXPECT_EQ(first("single"), "single");
  EXPECT_EQ(first("base"), "base");
  EXPECT_EQ(first("one_process"), "one-process");
  EXPECT_EQ(first("same_device"), "same-device");
  EXPECT_EQ(first("sequential"), "sequential-run1");
  EXPECT_EQ(first("gpipe"), "gpipe-run1");
  EXPECT_EQ(first("1f1b"), "1f1b-run1");
  EXPECT_EQ(first("zero-bubble"), "zero-bubble-run1");
  EXPECT_EQ(results.of("gpipe").runs.size(), 3U);
  EXPECT_EQ(results.of("gpipe").devices, 2);
  EXPECT_EQ(results.of("base").devices, 4);
  const auto& micro_batches = results.all("micro_batches");
  ASSERT_EQ(micro_batches.size(), 3U);
  EXPECT_EQ(first_program(micro_batches[0]), "micro-batches-2");
  EXPECT_EQ(first_program(micro_batches[1]), "base");
  const auto& batches = results.all("batch");
  ASSERT_EQ(batches.size(), 3U);
  EXPECT_EQ(first_program(batches[1]), "base");
  EXPECT_EQ(batches[2].size, 128);
}

TEST(Lab10Measures, CountTheTrace) {
  const PipelineRecord base = *made_lab10().of("base").runs[0].pipeline;
  EXPECT_EQ(counts_of(base).forwards, 16);
  EXPECT_EQ(counts_of(base).backwards, 16);
  EXPECT_EQ(counts_of(base).synchronisations, 4);
  EXPECT_EQ(counts_of(base, 1).forwards, 8);
  EXPECT_EQ(devices_used(base), 4);
  EXPECT_EQ(devices_of(base, 1), (Words{"cpu:1", "cpu:3"}));
  EXPECT_EQ(ranks_of(base), 2);
  const auto order = order_of(base);
  ASSERT_EQ(order.size(), 4U);
  EXPECT_EQ(order[0].first, "rank 0 cpu:0");
  EXPECT_TRUE(order[0].second.starts_with("F0 F1 F2 F3 B")) << order[0].second;
  EXPECT_EQ(counts_of(PipelineRecord{}).forwards, 0);
  EXPECT_TRUE(order_of(PipelineRecord{}).empty());
}

TEST(Lab10Measures, OverlapIsTimeInWhichSeveralDevicesCompute) {
  PipelineRecord pipeline;
  const auto add = [&pipeline](const char* kind, int rank, double begin, double end) {
    pipeline.actions.push_back(
        {.kind = kind, .rank = rank, .device = "cpu:0", .begin_ms = begin, .end_ms = end});
  };
  EXPECT_EQ(overlap_of(pipeline), 0);
  add("F", 0, 0, 2);
  add("F", 0, 2, 4);
  EXPECT_EQ(overlap_of(pipeline), 0) << "they touch";
  add("B", 0, 3, 5);
  EXPECT_DOUBLE_EQ(overlap_of(pipeline), 0.2);
  add("S", 0, 0, 5);
  add("F", 1, 0, 5);
  EXPECT_DOUBLE_EQ(overlap_of(pipeline), 0.2) << "neither synchronisation nor another rank counts";
  EXPECT_EQ(overlap_of(*made_lab10().of("same_device").runs[0].pipeline), 0);
  EXPECT_GT(overlap_of(*made_lab10().of("base").runs[0].pipeline), 0.5);
}

TEST(Lab10Measures, SynchronisationIsSetAgainstTheLastBackward) {
  const auto syncs = synchronisations_of(*made_lab10().of("base").runs[0].pipeline);
  ASSERT_EQ(syncs.size(), 4U);
  EXPECT_EQ(syncs[0].rank, 0);
  EXPECT_EQ(syncs[0].stage, 1) << "the last stage is through first";
  EXPECT_EQ(syncs[0].begin_ms, syncs[0].last_backward_ms);
  EXPECT_DOUBLE_EQ(syncs[0].hidden_ms, 1.5) << "while stage 0 goes backward for 2 ms";
  EXPECT_EQ(syncs[1].stage, 0);
  EXPECT_DOUBLE_EQ(syncs[1].hidden_ms, 0);
  EXPECT_EQ(syncs[2].rank, 1);
}

TEST(Lab10Measures, SimulatesWithMeasuredTimes) {
  const auto all = simulate_schedules(made_lab10().of("gpipe"));
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all[0].schedule.name, "gpipe");
  EXPECT_DOUBLE_EQ(all[0].simulation.makespan, 27) << "(8 + 1) × (1 + 2)";
  EXPECT_DOUBLE_EQ(all[1].simulation.makespan, 27);
  EXPECT_EQ(all[2].schedule.stages(), 4);
  EXPECT_LT(all[2].simulation.makespan, 27);
  EXPECT_LT(all[3].simulation.makespan, 27);
  EXPECT_DOUBLE_EQ(ideal_bubble(2, 8), 1.0 / 9);
  RunSet odd = test::made_hybrid_set({.ranks = 1, .micro_batches = 7, .rows = 70});
  EXPECT_EQ(simulate_schedules(odd).size(), 3U) << "7 micro-batches cannot be interleaved on 2";
  const RunSet rounds = test::made_hybrid_set({.ranks = 1, .stages = 3, .micro_batches = 8});
  EXPECT_EQ(simulate_schedules(rounds).size(), 4U) << "8 micro-batches go through 3 in two rounds";
  odd.runs[0].pipeline->stages[0].forward_ms = 0;
  EXPECT_TRUE(simulate_schedules(odd).empty());
  odd.runs[0].pipeline.reset();
  EXPECT_TRUE(simulate_schedules(odd).empty());
}

TEST(Lab10Tables, PlacementAndSynchronisation) {
  const Table placement = kLab.table(made_lab10(), "placement");
  EXPECT_EQ(placement.rows().size(), 10U);
  EXPECT_EQ(placement.rows()[1], (Words{"10.1", "0", "1", "cpu:2", "core 1", "1,000", "1.00 ms",
                                        "2.00 ms", "8.00 MiB"}));
  EXPECT_EQ(placement.rows()[7][3], "cpu:0") << "stage 1 on the device of stage 0";
  const Table syncs = kLab.table(made_lab10(), "synchronisation");
  ASSERT_EQ(syncs.rows().size(), 4U);
  EXPECT_EQ(syncs.rows()[0], (Words{"0", "1", "13.5 ms", "13.5 ms", "15.0 ms", "1.50 ms"}));
}

TEST(Lab10Tables, ActionsAndTimeOfEachPart) {
  const LabRuns results = made_lab10();
  const Table actions = kLab.table(results, "actions");
  EXPECT_EQ(actions.rows().size(), 7U);
  EXPECT_EQ(row_with(actions, "10.1 base"),
            (Words{"10.1 base", "2", "4 × 8", "16", "16", "4", "base", "0 %"}));
  EXPECT_EQ(row_with(actions, "10.2 micro 8")[2], "8 × 4");
  EXPECT_EQ(row_with(actions, "10.2 micro 8")[6], "other");
  EXPECT_EQ(row_with(actions, "10.3 batch 128")[6], "as base");
  EXPECT_EQ(row_with(actions, "10.3 batch 128")[7], "—") << "another batch, other losses";
  EXPECT_EQ(row_with(actions, "10.4 1 process"),
            (Words{"10.4 1 process", "1", "4 × 16", "8", "8", "0", "other", "0 %"}));
  const Table timing = kLab.table(results, "timing");
  EXPECT_EQ(row_with(timing, "10.1 base"),
            (Words{"10.1 base", "17.0 ± 0.0 ms", "20 %", "20 %", "60 %", "8.00 MiB", "8.00 KiB"}));
  EXPECT_EQ(row_with(timing, "10.5 1 device")[4], "0 %");
  EXPECT_FALSE(mentions(timing.terminal(false), "share the same hardware"));
  EXPECT_TRUE(mentions(kLab.table(made_lab10({.shared_by = 4}), "timing").terminal(false),
                       "All 4 devices share the same hardware"));
}

TEST(Lab10Tables, UnevenRowsAndDifferentLossesShow) {
  LabRuns results = made_lab10();
  set_up(results, "base").runs[0].pipeline->rows = {9, 8, 8, 7};
  set_up(results, "base").runs[0].losses[1] = 0.55;
  const auto row = row_with(kLab.table(results, "actions"), "10.1 base");
  EXPECT_EQ(row[2], "4 × 9 8 8 7");
  EXPECT_EQ(row[7], "10 %");
}

TEST(Lab10Tables, SchedulesRunAndSimulated) {
  const LabRuns results = made_lab10();
  const Table schedules = kLab.table(results, "schedules");
  EXPECT_EQ(row_with(schedules, "sequential")[2], "1");
  EXPECT_EQ(row_with(schedules, "gpipe"),
            (Words{"gpipe", "29.0 ± 0.0 ms", "1.72 ± 0.00", "8", "16.0 MiB / 16.0 MiB"}));
  EXPECT_EQ(row_with(kLab.table(results, "prediction"), "gpipe"),
            (Words{"gpipe", "11 %", "11 %", "27.0 ms", "27.0 ms", "100 %"}));
  EXPECT_EQ(row_with(schedules, "1f1b")[3], "2");
  EXPECT_EQ(schedules.rows().size(), 4U);
  EXPECT_EQ(row_with(schedules, "zero-bubble")[1], "27.0 ± 0.0 ms");
  EXPECT_EQ(row_with(schedules, "zero-bubble")[4], "9.00 MiB / 9.00 MiB");
  EXPECT_TRUE(mentions(schedules.title(), "2 stages in one process, 8 micro-batches, 512 rows"));
  const Table simulated = kLab.table(results, "simulated");
  EXPECT_EQ(row_with(simulated, "gpipe"), (Words{"gpipe", "2", "27.0 ms", "±0 %", "11 %", "8"}));
  EXPECT_EQ(row_with(simulated, "interleaved")[1], "4");
}

TEST(Lab10Tables, FitATerminalOf80Columns) {
  for (const LabRuns& results : {made_lab10(), made_lab10({.shared_by = 4})}) {
    for (const auto& [name, table] : kLab.report(results).tables) {
      EXPECT_LE(test::width_of(table), 80U) << name;
    }
  }
}

TEST(Lab10Tables, CommunicationPerAxis) {
  const Table table = kLab.table(made_lab10(), "communication");
  EXPECT_EQ(table.rows()[0],
            (Words{"10.1 base", "data", "2", "2", "8.00 KiB", "8.00 KiB", "1.50 ms", "1.00 ms"}));
  EXPECT_EQ(table.rows()[1][1], "pipeline");
  EXPECT_EQ(table.rows().size(), 16U);
  LabRuns wide = made_lab10();
  set_up(wide, "base").runs[0].pipeline->axes.push_back({.name = "tensor"});
  EXPECT_EQ(kLab.table(wide, "communication").rows().size(), 16U) << "an axis of one rank";
  set_up(wide, "base").runs[0].pipeline->axes.back().size = 2;
  EXPECT_EQ(kLab.table(wide, "communication").rows().size(), 17U);
}

TEST(Lab10Figures, PredictedStandsAboveMeasuredOnOneScale) {
  const auto figures = kLab.report(made_lab10()).figures;
  ASSERT_EQ(figures.size(), 6U);
  const auto& base = std::get<Timeline>(figures[0].chart);
  ASSERT_EQ(base.rows.size(), 7U);
  EXPECT_EQ(base.rows[0].label, "predicted cpu:0");
  EXPECT_EQ(base.rows[2].label, "") << "a gap";
  EXPECT_EQ(base.rows[3].label, "measured rank 0 cpu:0");
  EXPECT_EQ(base.rows[4].label, "measured rank 0 cpu:2");
  EXPECT_EQ(base.rows[0].spans[0].name, "F0");
  EXPECT_EQ(base.rows[3].spans[0].begin_ms, 0) << "from the first action on";
  EXPECT_EQ(base.rows[3].spans.back().name, "S");
  EXPECT_EQ(base.legend, (Words{"F: forward", "B: backward", "", "S: synchronisation"}));
  EXPECT_EQ(std::get<Timeline>(figures[1].chart).rows[3].label, "measured cpu:0");
  EXPECT_EQ(std::get<Timeline>(figures[3].chart).legend,
            (Words{"F: forward", "I: input gradient", "W: weight gradient", ""}));
  const auto& bubble = std::get<LineChart>(figures[4].chart);
  ASSERT_EQ(bubble.series.size(), 3U);
  EXPECT_EQ(bubble.series[0].x, (std::vector<double>{2, 4, 8}));
  EXPECT_NEAR(bubble.series[0].y[1], 20, 1e-9);
  EXPECT_NEAR(bubble.series[2].y[1], 20, 1e-9);
  const auto& time = std::get<BarChart>(figures[5].chart);
  EXPECT_EQ(time.categories, (Words{"sequential", "gpipe", "1f1b", "zero-bubble"}));
  EXPECT_DOUBLE_EQ(time.series[0].values[1], 27);
  EXPECT_DOUBLE_EQ(time.series[2].values[0], 50);
}

TEST(Lab10Figures, TheTerminalGetsAGridOfEachSchedule) {
  const auto drawings = kLab.report(made_lab10()).drawings;
  ASSERT_EQ(drawings.size(), 4U);
  EXPECT_TRUE(mentions(drawings[0], "gpipe, simulated")) << drawings[0];
  EXPECT_TRUE(mentions(drawings[0], "cpu:0 |")) << drawings[0];
  EXPECT_TRUE(mentions(drawings[0], "F0")) << drawings[0];
}

TEST(Lab10Report, HoldsAllParts) {
  const LabReport report = kLab.report(made_lab10());
  EXPECT_EQ(report.title, "Practical 10: hybrid parallelism");
  Words names;
  for (const auto& table : report.tables) names.push_back(table.name);
  EXPECT_EQ(names, (Words{"placement", "synchronisation", "actions", "timing", "schedules",
                          "prediction", "simulated", "communication"}));
  EXPECT_EQ(report.stamp.versions.at("libtorch"), "2.11.0");
  EXPECT_EQ(lab_named("10").folder, "reports/lab10");
}

TEST(Lab10Report, NamesWhatAnIncompleteFolderLacks) {
  kLab.expect_missing_runs_are_named(made_lab10());
}

}  // namespace
}  // namespace lockstep::cli::lab10_test
