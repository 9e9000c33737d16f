#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "cli/lab/lab_measures.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli::lab7_test {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::first_program;
using test::made_set;
using test::MadeRun;
using test::mentions;
using test::names_of;
using test::row_with;
using test::set_up;
using test::value_of;

const test::LabOf kLab{"7"};

// A whole lab, as an ideal run on two ranks would leave it.
LabRuns made_lab7(const MadeRun& like = {}) {
  const std::string amp = like.amp == "off" ? "bf16" : like.amp;
  const auto with = [&like](auto change) {
    MadeRun made = like;
    made.amp = "off";
    change(made);
    return made;
  };
  const auto plain = with([](MadeRun&) {});
  const auto many = with([](MadeRun& run) { run.accum_steps = 4, run.ms = 320; });
  const auto low = with([&amp](MadeRun& run) { run.amp = amp, run.ms = 50; });
  const double nan = std::numeric_limits<double>::quiet_NaN();
  LabRuns results;
  results.sets["fp32"] = {made_set(plain)};
  results.sets["amp"] = {made_set(low)};
  results.sets["accumulated"] = {made_set(many, 2, 4)};
  results.sets["synced"] = {
      made_set(with([](MadeRun& run) { run.accum_steps = 4, run.ms = 400, run.syncs = 4; }), 2, 4)};
  results.sets["one_batch"] = {
      made_set(with([](MadeRun& run) { run.rows = 256, run.ms = 310; }), 2, 4)};
  results.sets["combined"] = {made_set(
      with([&amp](MadeRun& run) { run.accum_steps = 4, run.amp = amp, run.ms = 160; }), 2, 4)};
  results.sets["no_scaler"] = {made_set(low, 1)};
  set_up(results, "no_scaler").runs[0].scale.reset();
  results.sets["overflow"] = {made_set(low, 1, 2)};
  set_up(results, "overflow").runs[0].scale = 32768;
  set_up(results, "overflow").runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  results.sets["overflow_no_scaler"] = {made_set(low, 1, 2)};
  RunRecord& broken = set_up(results, "overflow_no_scaler").runs[0];
  broken.scale.reset();
  broken.losses = {1.0, 0.5, nan, nan};
  broken.nonfinite = 2;
  test::add_studies(results, like, {64, 512});
  return results;
}

std::set<std::string> programs_of(const LabPlan& plan) {
  std::set<std::string> programs;
  for (const auto& experiment : plan.experiments) programs.insert(experiment.program);
  return programs;
}

TEST(Lab7Plan, QuickRunsEveryVariantTheQuestionsNeed) {
  const LabPlan plan = kLab.plan({.quick = true}, cores(2));
  EXPECT_EQ(names_of(plan), (std::vector<std::string>{"fp32-run1",
                                                      "bf16-run1",
                                                      "accum4-run1",
                                                      "accum4-sync-run1",
                                                      "rows-times4-run1",
                                                      "bf16-accum4-run1",
                                                      "bf16-no-scaler",
                                                      "bf16-overflow4",
                                                      "bf16-no-scaler-overflow4",
                                                      "small-lr0.9",
                                                      "small-lr0.9-undivided",
                                                      "small-lr3.6",
                                                      "deep-fp32-rows4096",
                                                      "deep-bf16-rows4096",
                                                      "deep-fp32-rows512",
                                                      "deep-bf16-rows512",
                                                      "deep-fp32-rows64",
                                                      "deep-bf16-rows64",
                                                      "fp32-run2",
                                                      "bf16-run2",
                                                      "accum4-run2",
                                                      "accum4-sync-run2",
                                                      "rows-times4-run2",
                                                      "bf16-accum4-run2"}));
  EXPECT_EQ(plan.repetitions, 2);
  EXPECT_EQ(programs_of(plan), (std::set<std::string>{"practical7_accumulation", "practical7_amp",
                                                      "homework2_combined"}));
  for (const auto& experiment : plan.experiments) {
    EXPECT_EQ(experiment.ranks, 2) << experiment.name;
    EXPECT_EQ(value_of(experiment, "--devices"), "cpu:2") << experiment.name;
    EXPECT_TRUE(experiment.cores.empty()) << experiment.name;
  }
}

TEST(Lab7Plan, FlagsSayWhatEachVariantIs) {
  const LabPlan plan = kLab.plan({.quick = true, .steps = 10, .batch = 32, .dim = 8}, cores(2));
  const auto tail = [&plan](const std::string& name) {
    const auto& words = experiment_named(plan, name).arguments;
    const auto quiet = std::find(words.begin(), words.end(), "--quiet");
    return quiet == words.end() ? words : std::vector<std::string>(quiet + 1, words.end());
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(tail("fp32-run1"), (Words{"--accum-steps", "1"}));
  EXPECT_EQ(tail("bf16-run1"), (Words{"--amp", "bf16"}));
  EXPECT_EQ(tail("accum4-sync-run1"), (Words{"--accum-steps", "4", "--sync-every-step"}));
  EXPECT_EQ(tail("bf16-accum4-run2"), (Words{"--accum-steps", "4", "--amp", "bf16"}));
  EXPECT_EQ(tail("bf16-no-scaler-overflow5"),
            (Words{"--amp", "bf16", "--no-scaler", "--overflow-at", "5"}));
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--batch"), "32");
  EXPECT_EQ(value_of(experiment_named(plan, "rows-times4-run1"), "--batch"), "128")
      << "one batch as large as four micro-steps";
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--steps"), "10");
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--dim"), "8");
}

TEST(Lab7Plan, StudiesHaveModelsOfTheirOwn) {
  const LabPlan plan =
      kLab.plan({.steps = 10, .batch = 32, .dim = 8, .own = {{"--accum-steps", "2"}}}, cores(2));
  const auto divided = experiment_named(plan, "small-lr0.9");
  const auto undivided = experiment_named(plan, "small-lr0.9-undivided");
  const auto larger = experiment_named(plan, "small-lr3.6");
  for (const auto& experiment : {divided, undivided, larger}) {
    EXPECT_EQ(experiment.program, "practical7_accumulation") << experiment.name;
    EXPECT_EQ(value_of(experiment, "--accum-steps"), "4") << "fewer would not diverge";
    EXPECT_EQ(value_of(experiment, "--steps"), "30") << experiment.name;
    EXPECT_EQ(value_of(experiment, "--dim"), "256") << experiment.name;
  }
  EXPECT_EQ(value_of(undivided, "--lr"), value_of(divided, "--lr"));
  EXPECT_EQ(undivided.arguments.back(), "--no-divide");
  EXPECT_NE(divided.arguments.back(), "--no-divide");
  EXPECT_EQ(value_of(larger, "--lr"), "3.6");
  const auto deep = experiment_named(plan, "deep-bf16-rows4096");
  EXPECT_EQ(deep.program, "practical7_amp");
  EXPECT_EQ(value_of(deep, "--batch"), "4096");
  EXPECT_EQ(value_of(deep, "--depth"), "8");
  EXPECT_EQ(value_of(deep, "--amp"), "bf16");
  EXPECT_EQ(value_of(deep, "--steps"), "4") << "the first warms up";
  const LabPlan many = kLab.plan({.own = {{"--accum-steps", "8"}}}, cores(2));
  EXPECT_EQ(value_of(experiment_named(many, "small-lr7.2"), "--accum-steps"), "8");
}

TEST(Lab7Plan, TheFullFormIsLongerAndKeepsWhatIsAsked) {
  const LabPlan plan = kLab.plan({}, cores(2));
  EXPECT_EQ(plan.repetitions, 3);
  EXPECT_FALSE(experiment_named(plan, "accum8-sync-run3").name.empty());
  const LabPlan asked = kLab.plan({.own = {{"--accum-steps", "6,3,3"}}}, cores(2));
  EXPECT_FALSE(experiment_named(asked, "accum3-run1").name.empty());
  EXPECT_FALSE(experiment_named(asked, "rows-times6-run1").name.empty());
  EXPECT_FALSE(experiment_named(asked, "bf16-accum3-run1").name.empty()) << "the fewest";
  EXPECT_TRUE(experiment_named(asked, "accum4-run1").name.empty());
  EXPECT_FALSE(experiment_named(kLab.plan({.steps = 1}, cores(2)), "bf16-overflow1").name.empty());
}

TEST(Lab7Plan, DevicesDecideRanksAndPrecision) {
  const auto ranks = [](const LabOptions& options, const Hardware& hardware) {
    return kLab.plan(options, hardware).experiments.front().ranks;
  };
  EXPECT_EQ(ranks({}, cores(8)), 2);
  EXPECT_EQ(ranks({.devices = "cpu:3"}, cores(8)), 3);
  EXPECT_EQ(ranks({}, cores(8, 4)), 4);
  EXPECT_EQ(ranks({}, cores(8, 1)), 1);
  EXPECT_FALSE(experiment_named(kLab.plan({}, cores(8, 1)), "fp16-run1").name.empty());
  EXPECT_FALSE(experiment_named(kLab.plan({.own = {{"--amp", "bf16"}}}, cores(8, 1)), "bf16-run1")
                   .name.empty());
}

TEST(Lab7Plan, BadValuesAreNamedWithARemedy) {
  expect_error(Code::kUsage, {"--amp fp8", "bf16 or fp16"}, [] {
    kLab.plan({.own = {{"--amp", "fp8"}}}, cores(2));
  });
  expect_error(Code::kUsage, {"--amp off"}, [] {
    kLab.plan({.own = {{"--amp", "off"}}}, cores(2));
  });
  expect_error(Code::kUsage, {"--amp fp16 needs a GPU", "--amp bf16"}, [] {
    kLab.plan({.own = {{"--amp", "fp16"}}}, cores(2));
  });
  expect_error(Code::kUsage, {"--accum-steps 1", "from 2 on"}, [] {
    kLab.plan({.own = {{"--accum-steps", "4,1"}}}, cores(2));
  });
  expect_error(Code::kSplit, {"--batch 1", "2 ranks"}, [] { kLab.plan({.batch = 1}, cores(2)); });
}

TEST(Lab7Results, CollectsEveryRecordToItsSetUp) {
  const LabPlan plan = kLab.plan({.own = {{"--accum-steps", "8,4"}}}, cores(2));
  const LabRuns results = test::named_runs(plan);
  const auto first = [&results](const char* what) { return first_program(results.of(what)); };
  EXPECT_EQ(first("fp32"), "fp32-run1");
  EXPECT_EQ(first("amp"), "bf16-run1");
  EXPECT_EQ(first("combined"), "bf16-accum4-run1");
  EXPECT_EQ(first("no_scaler"), "bf16-no-scaler");
  EXPECT_EQ(first("overflow"), "bf16-overflow10");
  EXPECT_EQ(first("overflow_no_scaler"), "bf16-no-scaler-overflow10");
  EXPECT_EQ(results.of("overflow").size, 10);
  ASSERT_EQ(results.all("accumulated").size(), 2U);
  EXPECT_EQ(results.all("accumulated")[0].size, 4);
  EXPECT_EQ(first_program(results.of("accumulated", 8)), "accum8-run1");
  EXPECT_EQ(first_program(results.of("synced", 8)), "accum8-sync-run1");
  EXPECT_EQ(first("divided"), "small-lr0.9");
  EXPECT_EQ(first("undivided"), "small-lr0.9-undivided");
  EXPECT_EQ(first("larger_rate"), "small-lr3.6");
  ASSERT_EQ(results.all("memory_fp32").size(), 3U);
  EXPECT_EQ(results.all("memory_fp32")[0].size, 64);
  EXPECT_EQ(first_program(results.of("memory_amp", 4096)), "deep-bf16-rows4096");
  EXPECT_EQ(first_program(results.of("one_batch", 8)), "rows-times8-run1");
  EXPECT_EQ(results.of("fp32").runs.size(), 3U);
  EXPECT_EQ(results.of("fp32").devices, 2);
}

TEST(LabMeasures, CompareWhatHasDifferentRows) {
  const LabRuns results = made_lab7();
  EXPECT_DOUBLE_EQ(rows_per_s(results.of("fp32")), 640);
  EXPECT_DOUBLE_EQ(rows_per_s(results.of("accumulated")), 800);
  EXPECT_DOUBLE_EQ(compare_per_row(results.of("fp32"), results.of("accumulated")).speedup.mean,
                   1.25);
  EXPECT_DOUBLE_EQ(norm_ratio(results.of("divided"), results.of("undivided")).value(), 4);
  EXPECT_EQ(peak_of(results.of("fp32")), 40_MiB);
  EXPECT_DOUBLE_EQ(relative_change(40_MiB, 30_MiB), -0.25);
  EXPECT_DOUBLE_EQ(relative_change(0, 30_MiB), 0);
}

TEST(Lab7Tables, BothTechniquesSideBySide) {
  const Table table = kLab.table(made_lab7(), "techniques");
  using Row = std::vector<std::string>;
  EXPECT_EQ(row_with(table, "goal")[1], "a batch of 256 rows");
  EXPECT_EQ(row_with(table, "memory: peak"), (Row{"memory: peak", "40.0 MiB", "44.0 MiB"}));
  EXPECT_EQ(row_with(table, "… without it"), (Row{"… without it", "64.0 MiB", "40.0 MiB"}));
  EXPECT_EQ(row_with(table, "… change"), (Row{"… change", "-38 %", "+10 %"}));
  EXPECT_EQ(row_with(table, "… deep model, 512 rows")[2], "-25 %") << "where memory does fall";
  EXPECT_EQ(row_with(table, "speed: rows/s over fp32"),
            (Row{"speed: rows/s over fp32", "1.25 ± 0.00", "2.00 ± 0.00"}));
  EXPECT_EQ(row_with(table, "communication: calls"), (Row{"communication: calls", "2", "2"}));
  EXPECT_EQ(row_with(table, "… bytes without it"),
            (Row{"… bytes without it", "64.0 MiB", "16.0 MiB"}));
  EXPECT_EQ(row_with(table, "… for rows"), (Row{"… for rows", "256", "64"}));
}

TEST(Lab7Tables, WaysToALargeBatch) {
  const Table table = kLab.table(made_lab7(), "accumulation");
  using Row = std::vector<std::string>;
  EXPECT_EQ(table.rows().size(), 4U);
  EXPECT_EQ(row_with(table, "fp32 alone"),
            (Row{"fp32 alone", "1 × 64", "100 ± 0 ms", "640", "40.0 MiB", "0.5", "—"}));
  EXPECT_EQ(row_with(table, "sync each"),
            (Row{"sync each", "4 × 64", "400 ± 0 ms", "640", "40.0 MiB", "0.5", "1.000"}));
  EXPECT_EQ(row_with(table, "one batch")[1], "1 × 256");
  EXPECT_EQ(row_with(table, "one batch")[4], "64.0 MiB");
  const Table sync = kLab.table(made_lab7(), "synchronisation");
  EXPECT_EQ(row_with(sync, "no_sync"),
            (Row{"no_sync", "4 × 64", "2", "16.0 MiB", "12.0 ms", "10.0 ms"}));
  EXPECT_EQ(row_with(sync, "sync each"),
            (Row{"sync each", "4 × 64", "8", "64.0 MiB", "48.0 ms", "40.0 ms"}));
}

TEST(Lab7Tables, FitATerminalOf80Columns) {
  for (const auto& [name, table] : kLab.report(made_lab7()).tables) {
    EXPECT_LE(test::width_of(table), 80U) << name;
  }
}

TEST(Lab7Tables, AnUndividedLossIsALargerLearningRate) {
  const Table table = kLab.table(made_lab7(), "divisor");
  using Row = std::vector<std::string>;
  ASSERT_EQ(table.rows().size(), 3U);
  EXPECT_EQ(table.columns()[7].header, "step 6");
  EXPECT_EQ(table.rows()[0], (Row{"divided by 4", "0.9", "0.1", "—", "0.6", "0.5", "0.2", "0.12"}));
  EXPECT_EQ(table.rows()[1],
            (Row{"undivided", "0.9", "0.4", "4.000", "0.6", "0.5", "900", "not finite"}));
  EXPECT_EQ(table.rows()[2],
            (Row{"divided by 4", "3.6", "0.1", "1.000", "0.6", "0.5", "900", "not finite"}));
}

TEST(Lab7Tables, MemoryFallsWhereActivationsOutweighTheCopies) {
  const Table table = kLab.table(made_lab7(), "memory_rows");
  using Row = std::vector<std::string>;
  ASSERT_EQ(table.rows().size(), 3U);
  EXPECT_EQ(table.rows()[0], (Row{"lab", "64", "40.0 MiB", "44.0 MiB", "+10 %", "8.00 MiB",
                                  "4.00 MiB", "8.00 MiB"}));
  EXPECT_EQ(table.rows()[2], (Row{"deep", "512", "96.0 MiB", "72.0 MiB", "-25 %", "64.0 MiB",
                                  "32.0 MiB", "8.00 MiB"}));
  EXPECT_TRUE(
      table.csv().starts_with("model,rows,peak_fp32_mib,peak_bf16_mib,change_percent,"
                              "activations_fp32_mib,activations_bf16_mib,copies_mib\r\n"))
      << table.csv();
}

TEST(Lab7Tables, SpeedAndStabilityAreMeasured) {
  using Row = std::vector<std::string>;
  const auto speed = kLab.table(made_lab7(), "precision").rows();
  ASSERT_EQ(speed.size(), 3U);
  EXPECT_EQ(speed[0], (Row{"fp32", "1 × 64", "100 ± 0 ms", "100 … 100 ms", "1"}));
  EXPECT_EQ(speed[1], (Row{"bf16", "1 × 64", "50.0 ± 0.0 ms", "50.0 … 50.0 ms", "2.00 ± 0.00"}));
  EXPECT_EQ(speed[2].back(), "2.50 ± 0.00") << "per row";
  const Table table = kLab.table(made_lab7(), "stability");
  EXPECT_EQ(row_with(table, "fp32"), (Row{"fp32", "—", "—", "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "bf16, scaler"), (Row{"bf16, scaler", "0", "65536", "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "overflow, scaler")[1], "1");
  EXPECT_EQ(row_with(table, "overflow, scaler")[2], "32768");
  const auto without = row_with(table, "overflow, no scaler");
  EXPECT_EQ(without[3], "2 of 4");
  EXPECT_EQ(without[4], "not finite");
  EXPECT_TRUE(mentions(table.notes().front(), "planted in step 2"));
}

TEST(Lab7Tables, MemoryAndGradientsAreSplit) {
  const LabRuns results = made_lab7();
  EXPECT_EQ(row_with(kLab.table(results, "memory"), "bf16, 1 × 64"),
            (std::vector<std::string>{"bf16, 1 × 64", "44.0 MiB", "16.0 MiB", "16.0 MiB", "0 B",
                                      "8.00 MiB", "4.00 MiB"}));
  EXPECT_EQ(row_with(kLab.table(results, "memory"), "fp32, 1 × 256").back(), "32.0 MiB");
  const Table gradients = kLab.table(results, "gradients");
  EXPECT_EQ(row_with(gradients, "fp32"),
            (std::vector<std::string>{"fp32", "4,000,000", "0.1 %", "12 %", "0.03 %", "0 %"}));
  EXPECT_TRUE(mentions(gradients.notes().front(), "No run here used fp16"));
  EXPECT_FALSE(
      mentions(kLab.table(made_lab7({.amp = "fp16"}), "gradients").notes().front(), "No run here"));
}

TEST(Lab7Report, ABusyMachineIsSaidOnceAndNoCauseIsNamed) {
  LabRuns results = made_lab7();
  EXPECT_TRUE(kLab.report(results).warning.empty());
  for (auto& [what, set_ups] : results.sets) {
    for (auto& set_up : set_ups) {
      for (auto& run : set_up.runs) {
        for (auto& device : run.devices) device.queued_fraction = 0.3;
      }
    }
  }
  const LabReport report = kLab.report(results);
  EXPECT_TRUE(mentions(report.warning, "cannot be judged")) << report.warning;
  for (const auto& table : report.tables) {
    EXPECT_FALSE(mentions(table.table.terminal(false), "Warning")) << table.name;
  }
  for (const auto& answer : report.answers) {
    for (const char* said : {"other programs", "proves little", "times as fast", "times slower"}) {
      EXPECT_FALSE(mentions(answer.text, said)) << answer.question << "\n" << answer.text;
    }
    EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
  }
  EXPECT_TRUE(kLab.answer(results, "more speed").starts_with("The times of this run cannot tell."));
}

TEST(Lab7Answers, StepsThatVaryDecideNothing) {
  LabRuns results = made_lab7();
  for (const char* what : {"synced", "accumulated"}) {
    for (auto& run : set_up(results, what).runs) run.step_ms.stddev = 120;
  }
  const std::string text = kLab.answer(results, "without no_sync");
  EXPECT_TRUE(mentions(text, "a step 400 ± ")) << text;
  EXPECT_TRUE(mentions(text, "it was not measurably faster or slower than with no_sync")) << text;
}

TEST(Lab7Figures, ShowSpeedMemoryAndLosses) {
  const auto figures = kLab.report(made_lab7()).figures;
  ASSERT_EQ(figures.size(), 4U);
  const auto& speed = std::get<BarChart>(figures[0].chart);
  ASSERT_EQ(speed.series.size(), 1U);
  EXPECT_EQ(speed.categories.size(), speed.series[0].values.size());
  EXPECT_DOUBLE_EQ(speed.series[0].values[4], 2) << speed.categories[4];
  const auto& memory = std::get<BarChart>(figures[1].chart);
  EXPECT_TRUE(memory.stacked);
  ASSERT_EQ(memory.series.size(), 5U);
  for (const auto& series : memory.series) {
    EXPECT_EQ(series.values.size(), memory.categories.size()) << series.name;
  }
  EXPECT_EQ(memory.series.back().values[2], static_cast<double>(32_MiB)) << "one batch";
  const auto& losses = std::get<LineChart>(figures[2].chart);
  ASSERT_EQ(losses.series.size(), 4U);
  EXPECT_EQ(losses.series[3].x, (std::vector<double>{1, 2, 3, 4}));
  EXPECT_TRUE(std::isnan(losses.series[3].y[2])) << "a gap";
  const auto& divisor = std::get<LineChart>(figures[3].chart);
  EXPECT_EQ(divisor.series[0].name, "divided, learning rate 0.9");
  EXPECT_EQ(divisor.series[1].y[2], 0.7);
  EXPECT_TRUE(std::isnan(divisor.series[1].y[3])) << "900 would hide the other lines";
  LabRuns bare = made_lab7();
  for (auto& run : set_up(bare, "fp32").runs) run.memory.reset();
  const auto figures_of_bare = kLab.report(bare).figures;
  EXPECT_TRUE(std::isnan(std::get<BarChart>(figures_of_bare[1].chart).series[0].values[0]));
}

TEST(Lab7Report, HoldsAllParts) {
  const LabReport report = kLab.report(made_lab7());
  EXPECT_EQ(report.title, "Practical 7: gradient accumulation and mixed precision");
  EXPECT_EQ(report.stamp.versions.at("libtorch"), "2.11.0");
  EXPECT_EQ(report.tables.size(), 9U);
  EXPECT_EQ(report.figures.size(), 4U);
  ASSERT_EQ(report.code.size(), 2U);
  EXPECT_EQ(report.code[0].name, "practical7_accumulation.cpp");
  EXPECT_TRUE(mentions(report.code[0].text, "lockstep::NoSync"));
  EXPECT_EQ(report.trained.back().first, "command");
  EXPECT_EQ(report.trained.back().second, "lockstep lab 7 --accum-steps 4 --amp bf16");
  EXPECT_EQ(lab_named("7").folder, "reports/lab7");
}

TEST(Lab7Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  LabRuns bare = made_lab7();
  for (auto& [what, set_ups] : bare.sets) {
    for (auto& run : set_ups.at(0).runs) {
      run.memory.reset();
      run.gradient_check.reset();
      run.scale.reset();
      run.skipped_steps.clear();
      run.losses.clear();
      run.all_reduces = {};
      run.step_ms = {};
      run.devices[0].peak_bytes = run.devices[1].peak_bytes = 0;
    }
  }
  for (const auto& results : {made_lab7(), made_lab7({.amp = "fp16"}), made_lab7({.ranks = 1}),
                              made_lab7({.shared_by = 2}), bare}) {
    const auto answers = kLab.report(results).answers;
    EXPECT_EQ(answers.size(), 10U);
    for (const auto& answer : answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.question << "\n" << answer.text;
    }
    EXPECT_EQ(kLab.report(results).tables.size(), 9U);
  }
}

TEST(Lab7Answers, TheLossIsDividedBecauseUndividedItDiverges) {
  const std::string text = kLab.answer(made_lab7(), "divided");
  EXPECT_TRUE(mentions(text, "4 micro-steps give the sum of 4 means")) << text;
  EXPECT_TRUE(mentions(text, "the learning rate is in effect 4 times what was chosen")) << text;
  EXPECT_TRUE(mentions(text, "Divided, the loss went from 0.6 to 0.12 in 6 steps.")) << text;
  EXPECT_TRUE(mentions(text,
                       "had the norm 0.4 instead of 0.1 (4.00 times), and training diverged: from "
                       "step 5 on the loss was not finite."))
      << text;
  EXPECT_TRUE(mentions(text, "at 3.6, the divided run had the same losses as the undivided one."))
      << text;
  EXPECT_TRUE(mentions(text, "was 0.5, and 0.5 with one batch of 256 rows: accumulation is"))
      << text;
  LabRuns other = made_lab7();
  set_up(other, "one_batch").runs[0].gradient_check->norm = 0.4;
  EXPECT_TRUE(mentions(kLab.answer(other, "divided"), "norm and losses were at most 25 % apart."));
  LabRuns other_rows = made_lab7();
  set_up(other_rows, "one_batch").runs[0].losses[1] = 0.4;
  EXPECT_TRUE(mentions(kLab.answer(other_rows, "divided"), "at most 25 % apart"));
  set_up(other, "undivided").runs[0].gradient_check.reset();
  EXPECT_TRUE(mentions(kLab.answer(other, "divided"), "did not record their gradients"));
}

TEST(Lab7Answers, WhatTheUndividedRunDidIsSaidAsItWas) {
  LabRuns results = made_lab7();
  auto& losses = set_up(results, "undivided").runs[0].losses;
  set_up(results, "undivided").runs[0].nonfinite = 0;
  losses = {0.6, 0.5, 0.7, 0.9, 2, 7};
  const std::string rose = kLab.answer(results, "divided");
  EXPECT_TRUE(mentions(rose, "training diverged: the loss rose from 0.6 to 7.")) << rose;
  EXPECT_TRUE(mentions(rose, "as the undivided one in its first 3 steps.")) << rose;
  losses = {0.6, 0.5, 0.5, 0.5, 0.5, 0.4};
  const std::string worse = kLab.answer(results, "divided");
  EXPECT_TRUE(mentions(worse, "it trained worse: the loss ended at 0.4.")) << worse;
  losses = {0.6, 0.4, 0.3, 0.2, 0.1, 0.05};
  const std::string harmless = kLab.answer(results, "divided");
  EXPECT_TRUE(mentions(harmless, "did no harm here, so these runs cannot show that it can."))
      << harmless;
  EXPECT_FALSE(mentions(harmless, "diverged")) << harmless;
  set_up(results, "divided").runs[0].losses.back() = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(mentions(kLab.answer(results, "divided"), "did not stay finite even divided"));
}

TEST(Lab7Answers, SynchronisationIsCounted) {
  const std::string skipped = kLab.answer(made_lab7(), "skipped");
  EXPECT_TRUE(mentions(skipped, "made 2 all-reduces (16.0 MiB)")) << skipped;
  EXPECT_TRUE(mentions(skipped, "4 micro-steps made 8 all-reduces (64.0 MiB).")) << skipped;
  EXPECT_TRUE(mentions(skipped, "The norm of the first gradient was the same.")) << skipped;
  const std::string without = kLab.answer(made_lab7(), "without no_sync");
  EXPECT_TRUE(mentions(without, "64.0 MiB per optimizer step instead of 16.0 MiB")) << without;
  EXPECT_TRUE(mentions(without, "All 4 losses equal those with no_sync exactly.")) << without;
  EXPECT_TRUE(mentions(without, "took 40.0 ms instead of 10.0 ms")) << without;
  EXPECT_TRUE(mentions(without, "1.25 times slower than with no_sync")) << without;
  LabRuns wrong = made_lab7();
  set_up(wrong, "synced").runs[0].gradient_check->norm = 1;
  EXPECT_TRUE(mentions(kLab.answer(wrong, "skipped"), "100 % apart"));
  LabRuns one_bucket = made_lab7();
  for (auto& run : set_up(one_bucket, "accumulated").runs) run.all_reduces.count = 1;
  EXPECT_TRUE(mentions(kLab.answer(one_bucket, "skipped"), "made 1 all-reduce (16.0 MiB)"));
}

TEST(Lab7Answers, OneRankAndSharedHardwareAreNotSoldAsMore) {
  const LabRuns one = made_lab7({.ranks = 1});
  for (const char* question : {"skipped", "without no_sync"}) {
    EXPECT_TRUE(mentions(kLab.answer(one, question), "This run had one rank")) << question;
  }
  EXPECT_TRUE(mentions(kLab.answer(one, "compare"), "With one rank neither communicates."));
  EXPECT_TRUE(mentions(kLab.answer(one, "more speed"), "with several ranks communication"));
  const LabRuns shared = made_lab7({.shared_by = 2});
  for (const char* question : {"without no_sync", "more speed"}) {
    EXPECT_TRUE(mentions(kLab.answer(shared, question), "All 2 devices share the same hardware"))
        << question;
  }
}

TEST(Lab7Answers, PrecisionIsMeasured) {
  const std::string why = kLab.answer(made_lab7(), "Why mixed");
  EXPECT_TRUE(mentions(
      why, "50.0 ± 0.0 ms in bf16 and 100 ± 0 ms in fp32: it was 2.00 times as fast as in fp32."))
      << why;
  EXPECT_TRUE(mentions(why, "took 4.00 MiB instead of 8.00 MiB, but autocast also keeps 8.00 MiB"))
      << why;
  EXPECT_TRUE(mentions(why, "All 4 losses equal fp32's exactly.")) << why;
  LabRuns uncopied = made_lab7();
  for (auto& run : set_up(uncopied, "amp").runs) run.memory->low_precision = 0;
  EXPECT_FALSE(mentions(kLab.answer(uncopied, "Why mixed"), "copies"));
  LabRuns slow = made_lab7();
  for (auto& run : set_up(slow, "amp").runs) run.step_ms.mean = 200;
  EXPECT_TRUE(mentions(kLab.answer(slow, "Why mixed"), "2.00 times slower than in fp32"));
}

TEST(Lab7Answers, TheScalersReasonIsInTheGradients) {
  const std::string bf16 = kLab.answer(made_lab7(), "Why is a GradScaler");
  EXPECT_TRUE(mentions(bf16,
                       "had 4,000,000 gradient values: fp16 would lose 12 % of them, and after "
                       "multiplication by 65536 0.03 % of them"))
      << bf16;
  EXPECT_TRUE(mentions(bf16, "none would then be too large")) << bf16;
  EXPECT_TRUE(mentions(bf16, "The run itself computed in bf16")) << bf16;
  LabRuns large = made_lab7();
  set_up(large, "fp32").runs[0].gradient_check->fp16_overflow_scaled = 0.02;
  set_up(large, "fp32").runs[0].gradient_check->fp16_lost_scaled = 1e-9;
  const std::string text = kLab.answer(large, "Why is a GradScaler");
  EXPECT_TRUE(mentions(text, "by 65536 less than 0.001 % of them")) << text;
  EXPECT_TRUE(mentions(text, "2 % of them would then be too large for it, which is why")) << text;
  set_up(large, "fp32").runs[0].gradient_check->fp16_lost_scaled = 0;
  EXPECT_TRUE(mentions(kLab.answer(large, "Why is a GradScaler"), "65536 none of them;"));
  EXPECT_FALSE(mentions(kLab.answer(made_lab7({.amp = "fp16"}), "Why is a GradScaler"), "bf16"));
}

TEST(Lab7Answers, WithoutAScalerAnOverflowReachesTheWeights) {
  const std::string text = kLab.answer(made_lab7(), "What happens without it");
  EXPECT_TRUE(text.starts_with("Small gradients would become 0 in fp16; in bf16")) << text;
  EXPECT_TRUE(mentions(text,
                       "planted in step 2: the scaler skipped that step (it named "
                       "layers.0.weight, and the scale went from 65536 to 32768), and every loss "
                       "stayed finite."))
      << text;
  EXPECT_TRUE(mentions(text, "reached the weights, and 2 of 4 losses were not finite.")) << text;

  LabRuns fp16 = made_lab7({.amp = "fp16"});
  set_up(fp16, "no_scaler").runs[0].gradient_check->zero_share = 0.3;
  EXPECT_TRUE(mentions(kLab.answer(fp16, "What happens without it"),
                       "30 % of the first gradient's values were 0 without a scaler, 0.1 %"));

  LabRuns missed = made_lab7();
  set_up(missed, "overflow").runs[0].skipped_steps[0].step = 3;
  set_up(missed, "overflow_no_scaler").runs[0].nonfinite = 0;
  const std::string honest = kLab.answer(missed, "What happens without it");
  EXPECT_TRUE(mentions(honest, "planted in step 2 was not skipped in this run.")) << honest;
  EXPECT_TRUE(mentions(honest, "no loss became infinite either.")) << honest;
}

TEST(Lab7Answers, ComparisonsFollowTheFigures) {
  EXPECT_TRUE(
      kLab.answer(made_lab7(), "more memory").starts_with("Accumulation, with this lab's model."));
  EXPECT_TRUE(kLab.answer(made_lab7(), "more speed").starts_with("Mixed precision, in this run."));
  LabRuns other = made_lab7();
  for (auto& run : set_up(other, "amp").runs) {
    run.step_ms.mean = 81;
    for (auto& device : run.devices) device.peak_bytes = 10_MiB;
  }
  EXPECT_TRUE(
      kLab.answer(other, "more memory").starts_with("Mixed precision, with this lab's model."));
  EXPECT_TRUE(kLab.answer(other, "more speed").starts_with("Neither clearly, in this run."));
  for (auto& run : set_up(other, "amp").runs) run.step_ms.mean = 120;
  EXPECT_TRUE(kLab.answer(other, "more speed").starts_with("Accumulation, in this run."));
  for (auto& device : set_up(other, "amp").runs[0].devices) device.peak_bytes = 100_MiB;
  for (auto& device : set_up(other, "accumulated").runs[0].devices) device.peak_bytes = 90_MiB;
  EXPECT_TRUE(
      kLab.answer(other, "more memory").starts_with("Neither saved any with this lab's model."));
  EXPECT_TRUE(mentions(kLab.answer(other, "compare"),
                       "the activations smaller, but adds copies of the weights: its peak was"))
      << "a peak that rose does not follow from smaller activations";
  EXPECT_TRUE(mentions(kLab.answer(made_lab7(), "combined"),
                       "4 micro-steps in bf16 trained 2.50 ± 0.00 times the rows per second of "
                       "plain fp32 (1.25 ± 0.00 with accumulation alone, 2.00 ± 0.00 with bf16 "
                       "alone)"));
  EXPECT_TRUE(mentions(kLab.answer(made_lab7(), "more memory"),
                       "A deep, narrow model with 512 rows a step took 72.0 MiB in bf16 against "
                       "96.0 MiB in fp32 (-25 %): there the activations outweigh the copies"));
  LabRuns large = made_lab7();
  for (auto& device : set_up(large, "memory_amp", 1).runs[0].devices) device.peak_bytes = 200_MiB;
  EXPECT_TRUE(mentions(kLab.answer(large, "more memory"), "not even there did memory fall."));
}

TEST(Lab7Report, NamesWhatAnIncompleteFolderLacks) {
  kLab.expect_missing_runs_are_named(made_lab7());
}

}  // namespace
}  // namespace lockstep::cli::lab7_test
