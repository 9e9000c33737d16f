#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli::homework2_test {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::first_program;
using test::made_set;
using test::mentions;
using test::names_of;
using test::row_with;
using test::set_up;
using test::value_of;

const test::LabOf kLab{"homework2"};

// A whole homework at ACCUM_STEPS 4 and 8, as an ideal run would leave it.
LabRuns results_of(int ranks = 2, int shared_by = 1) {
  const auto set = [=](double ms, int64_t accum_steps, const char* amp, int64_t rows = 64,
                       double syncs = 1, double norm = 0.5) {
    return made_set({.ms = ms,
                     .accum_steps = accum_steps,
                     .rows = rows,
                     .amp = amp,
                     .syncs = syncs,
                     .norm = norm,
                     .ranks = ranks,
                     .shared_by = shared_by},
                    2, accum_steps);
  };
  LabRuns results;
  results.sets["fp32"] = {set(100, 1, "off")};
  results.sets["amp"] = {set(50, 1, "bf16")};
  results.sets["accumulated"] = {set(320, 4, "off"), set(600, 8, "off")};
  results.sets["combined"] = {set(160, 4, "bf16"), set(300, 8, "bf16")};
  results.sets["synced"] = {set(400, 4, "off", 64, 4)};
  results.sets["one_batch"] = {set(310, 1, "off", 256)};
  results.sets["undivided"] = {set(320, 4, "off", 64, 1, 2)};
  set_up(results, "undivided").runs[0].losses = {1.0, 2.0, 4.0, 8.0};
  return results;
}

size_t words_in(const std::string& text) {
  std::istringstream stream(text);
  size_t words = 0;
  for (std::string word; stream >> word;) ++words;
  return words;
}

TEST(Homework2Plan, RunsTheCodesAndTheirReferences) {
  const LabPlan plan = kLab.plan({.quick = true}, cores(2));
  EXPECT_EQ(plan.repetitions, 2);
  const auto names = names_of(plan);
  ASSERT_EQ(names.size(), 24U);
  EXPECT_EQ(std::vector<std::string>(names.begin(), names.begin() + 13),
            (std::vector<std::string>{"fp32-run1", "bf16-run1", "accum4-run1", "bf16-accum4-run1",
                                      "accum8-run1", "bf16-accum8-run1", "accum16-run1",
                                      "bf16-accum16-run1", "accum32-run1", "bf16-accum32-run1",
                                      "accum4-sync-run1", "rows-times4", "accum4-undivided"}));
  const auto program = [&plan](const char* name) { return experiment_named(plan, name).program; };
  EXPECT_EQ(program("accum16-run2"), "practical7_accumulation");
  EXPECT_EQ(program("bf16-run2"), "practical7_amp");
  EXPECT_EQ(program("bf16-accum32-run2"), "homework2_combined");
  for (const auto& experiment : plan.experiments) EXPECT_EQ(experiment.ranks, 2);
}

TEST(Homework2Plan, CodesHaveTheSameModelAndMicroBatch) {
  const LabPlan plan =
      kLab.plan({.batch = 48, .hidden = 96, .own = {{"--accum-steps", "6,2"}}}, cores(4));
  EXPECT_EQ(plan.repetitions, 3);
  for (const char* name : {"accum2-run1", "bf16-run1", "bf16-accum6-run3"}) {
    EXPECT_EQ(value_of(experiment_named(plan, name), "--batch"), "48") << name;
    EXPECT_EQ(value_of(experiment_named(plan, name), "--hidden"), "96") << name;
  }
  EXPECT_EQ(value_of(experiment_named(plan, "rows-times2"), "--batch"), "96");
  EXPECT_FALSE(experiment_named(plan, "accum2-sync-run1").name.empty()) << "at the first point";
  EXPECT_GT(experiment_named(plan, "accum6-run1").weight,
            experiment_named(plan, "accum2-run1").weight);
}

TEST(Homework2Plan, BadValuesAreNamedWithARemedy) {
  expect_error(Code::kUsage, {"--accum-steps 1"}, [] {
    kLab.plan({.own = {{"--accum-steps", "1,4"}}}, cores(2));
  });
  expect_error(Code::kUsage, {"--amp fp16 needs a GPU"}, [] {
    kLab.plan({.own = {{"--amp", "fp16"}}}, cores(2));
  });
  expect_error(Code::kSplit, {"--batch 2", "4 ranks", "--devices"},
               [] { kLab.plan({.devices = "cpu:4", .batch = 2}, cores(4)); });
}

TEST(Homework2Results, CollectsEveryRecordToItsSetUp) {
  const LabPlan plan = kLab.plan({.quick = true, .own = {{"--accum-steps", "8,4"}}}, cores(2));
  const LabRuns results = test::named_runs(plan);
  const auto first = [&results](const char* what) { return first_program(results.of(what)); };
  EXPECT_EQ(first("fp32"), "fp32-run1");
  EXPECT_EQ(first("amp"), "bf16-run1");
  EXPECT_EQ(first("synced"), "accum4-sync-run1");
  EXPECT_EQ(first("one_batch"), "rows-times4");
  EXPECT_EQ(first("undivided"), "accum4-undivided");
  ASSERT_EQ(results.all("accumulated").size(), 2U);
  EXPECT_EQ(results.all("accumulated")[0].size, 4);
  EXPECT_EQ(first_program(results.of("accumulated", 8)), "accum8-run1");
  EXPECT_EQ(first_program(results.of("combined", 8)), "bf16-accum8-run1");
  EXPECT_EQ(results.of("combined", 8).runs.size(), 2U);
  EXPECT_EQ(results.of("fp32").devices, 2);
}

TEST(Homework2Tables, CodesStandBesideEachOther) {
  LabRuns results = results_of();
  set_up(results, "amp").runs[0].losses[1] = 0.505;
  set_up(results, "combined").runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  set_up(results, "combined").runs[0].scale = 32768;
  const Table table = kLab.table(results, "codes");
  EXPECT_LE(table.columns().size(), 7U) << "a page is narrow";
  using Row = std::vector<std::string>;
  EXPECT_EQ(row_with(table, "micro-steps × rows"),
            (Row{"micro-steps × rows", "1 × 64", "4 × 64", "1 × 64", "4 × 64"}));
  EXPECT_EQ(row_with(table, "time: per row"),
            (Row{"time: per row", "1.56 ms", "1.25 ms", "781 µs", "625 µs"}));
  EXPECT_EQ(row_with(table, "speed per row"),
            (Row{"speed per row", "1", "1.25 ± 0.00", "2.00 ± 0.00", "2.50 ± 0.00"}));
  EXPECT_EQ(row_with(table, "memory: peak"),
            (Row{"memory: peak", "40.0 MiB", "40.0 MiB", "44.0 MiB", "44.0 MiB"}));
  EXPECT_EQ(row_with(table, "… low-precision copies"),
            (Row{"… low-precision copies", "0 B", "0 B", "8.00 MiB", "8.00 MiB"}));
  EXPECT_EQ(row_with(table, "stability: finite losses")[1], "4 of 4");
  EXPECT_EQ(row_with(table, "… skipped steps"), (Row{"… skipped steps", "—", "—", "0", "1"}));
  EXPECT_EQ(row_with(table, "… final scale"), (Row{"… final scale", "—", "—", "65536", "32768"}));
  EXPECT_EQ(row_with(table, "… largest loss deviation"),
            (Row{"… largest loss deviation", "—", "0 %", "1 %", "0 %"}));
}

TEST(Homework2Tables, WhatIsNotRecordedIsADash) {
  LabRuns results = results_of();
  for (auto& run : set_up(results, "amp").runs) {
    run.memory.reset();
    run.scale.reset();
    run.losses[2] = std::numeric_limits<double>::quiet_NaN();
    run.nonfinite = 1;
  }
  const Table table = kLab.table(results, "codes");
  EXPECT_EQ(row_with(table, "… weights")[3], "—");
  EXPECT_EQ(row_with(table, "… final scale")[3], "—");
  EXPECT_EQ(row_with(table, "stability: finite losses")[3], "3 of 4");
  EXPECT_EQ(row_with(table, "… largest loss deviation")[3], "not finite");
}

TEST(Homework2Tables, AccumStepsAreObserved) {
  const Table table = kLab.table(results_of(), "accum_steps");
  EXPECT_LE(table.columns().size(), 7U);
  ASSERT_EQ(table.rows().size(), 4U);
  using Row = std::vector<std::string>;
  EXPECT_EQ(table.rows()[0], (Row{"1, 4", "256", "320 ± 0 ms", "80.0 ms", "40.0 MiB", "2, 16.0 MiB",
                                  "20 % less time per row than fp32 alone"}));
  EXPECT_EQ(table.rows()[1], (Row{"1, 8", "512", "600 ± 0 ms", "75.0 ms", "40.0 MiB", "2, 16.0 MiB",
                                  "6 % less time per row than 4, same peak"}));
  EXPECT_EQ(table.rows()[2][0], "3, 4");
  EXPECT_EQ(table.rows()[2].back(), "2.00 × code 1's speed, peak +10 %");
}

TEST(Homework2Tables, ObservationsFollowTheFigures) {
  LabRuns results = results_of();
  for (auto& run : set_up(results, "accumulated", 1).runs) {
    run.step_ms.mean = 1280;
    for (auto& device : run.devices) device.peak_bytes = 60_MiB;
  }
  EXPECT_EQ(kLab.table(results, "accum_steps").rows()[1].back(),
            "100 % more time per row than 4, peak +50 %");
  for (auto& run : set_up(results, "accumulated", 1).runs) run.step_ms.mean = 641;
  EXPECT_TRUE(
      mentions(kLab.table(results, "accum_steps").rows()[1].back(), "as fast per row as 4"));
  for (auto& run : set_up(results, "combined", 1).runs) run.step_ms.mean = 1282;
  EXPECT_EQ(kLab.table(results, "accum_steps").rows()[3].back(),
            "0.50 × code 1's speed, peak -27 %");
}

TEST(Homework2Tables, NoiseAndABusyMachineAreWarnedAbout) {
  LabRuns results = results_of();
  EXPECT_FALSE(mentions(kLab.table(results, "codes").terminal(false), "Warning"));
  set_up(results, "amp").runs[0].step_ms.mean = 90;
  results.others_busy_cores = 0.5;
  const std::string text = kLab.table(results, "codes").terminal(false);
  EXPECT_TRUE(mentions(text, "Warning: step times varied")) << text;
  EXPECT_TRUE(mentions(text, "kept 0.5 cores busy")) << text;
}

TEST(Homework2Answers, ThreeOfThemShortAndWithFigures) {
  const auto answers = kLab.report(results_of()).answers;
  ASSERT_EQ(answers.size(), 3U);
  for (const auto& answer : answers) {
    EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
    EXPECT_GE(words_in(answer.text), 60U) << answer.text;
    EXPECT_LE(words_in(answer.text), 120U) << answer.text;
  }
}

TEST(Homework2Answers, TimeIsSynchronisationAndPrecision) {
  const std::string text = kLab.answer(results_of(), "Execution time");
  EXPECT_TRUE(
      text.starts_with("A row took 1.25 ms with code 1, 781 µs with code 2 and 625 µs with "
                       "code 3, against 1.56 ms in plain fp32."))
      << text;
  EXPECT_TRUE(mentions(text,
                       "every 64 rows cost 2 all-reduces (16.0 MiB), with ACCUM_STEPS 4 "
                       "every 256"))
      << text;
  EXPECT_TRUE(mentions(text, "went from 10 to 3 % of the step")) << text;
  EXPECT_TRUE(mentions(text, "Without no_sync, code 1 was 1.25 times slower than with it."))
      << text;
  EXPECT_TRUE(mentions(text,
                       "code 2 was 2.00 times as fast as fp32, and code 3 2.00 times as fast "
                       "as code 1."))
      << text;
  EXPECT_TRUE(mentions(text, "The two combine")) << text;
  LabRuns slow = results_of();
  for (auto& run : set_up(slow, "combined").runs) run.step_ms.mean = 400;
  EXPECT_FALSE(mentions(kLab.answer(slow, "Execution time"), "The two combine"));
  EXPECT_TRUE(mentions(kLab.answer(results_of(1), "Execution time"), "This run had one rank"));
  EXPECT_TRUE(mentions(kLab.answer(results_of(2, 2), "Execution time"),
                       "All 2 devices share the same hardware"));
}

TEST(Homework2Answers, MemoryIsSplit) {
  const std::string text = kLab.answer(results_of(), "Memory");
  EXPECT_TRUE(mentions(text,
                       "The peak was 40.0 MiB with code 1, 44.0 MiB with code 2 and 44.0 MiB "
                       "with code 3."))
      << text;
  EXPECT_TRUE(mentions(text, "16.0 MiB of weights, 16.0 MiB of gradients and no optimizer state"))
      << text;
  EXPECT_TRUE(mentions(text,
                       "activations took 8.00 MiB at ACCUM_STEPS 4 and 8.00 MiB at 8, but "
                       "32.0 MiB in one batch of 256 rows."))
      << text;
  EXPECT_TRUE(mentions(text, "4.00 MiB in bf16 against 8.00 MiB in fp32, and 8.00 MiB of low"))
      << text;
  EXPECT_TRUE(mentions(text, "With so few rows")) << text;
  LabRuns other = results_of();
  for (auto& run : set_up(other, "accumulated").runs) run.memory->optimizer_state = 32_MiB;
  for (auto& run : set_up(other, "amp").runs) {
    for (auto& device : run.devices) device.peak_bytes = 30_MiB;
  }
  EXPECT_TRUE(mentions(kLab.answer(other, "Memory"), "32.0 MiB of optimizer state in fp32"));
  EXPECT_FALSE(mentions(kLab.answer(other, "Memory"), "With so few rows"));
  for (auto& run : set_up(other, "amp").runs) run.memory.reset();
  EXPECT_TRUE(
      mentions(kLab.answer(other, "Memory"), "did not record what their peaks are made of"));
}

TEST(Homework2Answers, TheEffectiveBatchAndItsDivisor) {
  const std::string text = kLab.answer(results_of(), "Effective batch");
  EXPECT_TRUE(mentions(text, "64 rows became 256 at 4 and 512 at 8, with one update each")) << text;
  EXPECT_TRUE(mentions(text, "norm was 2 instead of 0.5: 4.00 times")) << text;
  EXPECT_TRUE(mentions(text, "the loss ended at 8 instead of 0.2.")) << text;
  EXPECT_TRUE(mentions(text,
                       "Divided, it was equal to that of one batch of 256 rows, and the "
                       "losses differed by at most 0 %."))
      << text;
  LabRuns other = results_of();
  set_up(other, "one_batch").runs[0].gradient_check->norm = 0.4;
  set_up(other, "undivided").runs[0].nonfinite = 1;
  other.sets["accumulated"].resize(1);
  other.sets["combined"].resize(1);
  const std::string changed = kLab.answer(other, "Effective batch");
  EXPECT_TRUE(mentions(changed, "it was 1.250 times that of one batch")) << changed;
  EXPECT_TRUE(mentions(changed, "the loss did not stay finite.")) << changed;
  EXPECT_TRUE(mentions(changed, "became 256 at 4, with one update each")) << changed;
  for (auto& run : set_up(other, "undivided").runs) run.gradient_check.reset();
  EXPECT_TRUE(mentions(kLab.answer(other, "Effective batch"), "did not record their gradients"));
}

TEST(Homework2Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  LabRuns bare = results_of();
  for (auto& [what, set_ups] : bare.sets) {
    for (auto& set_up : set_ups) {
      for (auto& run : set_up.runs) {
        run.memory.reset();
        run.gradient_check.reset();
        run.scale.reset();
        run.losses.clear();
        run.all_reduces = {};
        run.step_ms = {};
      }
    }
  }
  for (const auto& results : {results_of(1), results_of(2, 2), bare}) {
    const LabReport report = kLab.report(results);
    EXPECT_EQ(report.answers.size(), 3U);
    EXPECT_EQ(report.tables.size(), 2U);
    for (const auto& answer : report.answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
    }
  }
}

TEST(Homework2Figures, TimeAndMemoryOverAccumSteps) {
  const auto figures = kLab.report(results_of()).figures;
  ASSERT_EQ(figures.size(), 2U);
  const auto& time = std::get<LineChart>(figures[0].chart);
  EXPECT_TRUE(time.log_x);
  ASSERT_EQ(time.series.size(), 2U);
  EXPECT_EQ(time.series[0].x, (std::vector<double>{4, 8}));
  EXPECT_EQ(time.series[0].y, (std::vector<double>{320, 600}));
  EXPECT_EQ(time.series[1].y, (std::vector<double>{160, 300}));
  const auto& memory = std::get<BarChart>(figures[1].chart);
  EXPECT_EQ(memory.categories,
            (std::vector<std::string>{"1, 4", "3, 4", "1, 8", "3, 8", "one batch"}));
  EXPECT_TRUE(memory.stacked);
  EXPECT_EQ(memory.series.back().values.back(), static_cast<double>(32_MiB));
}

TEST(Homework2Report, HoldsAllParts) {
  const LabReport report = kLab.report(results_of());
  EXPECT_EQ(report.title, "Homework 2: accumulation and mixed precision");
  EXPECT_EQ(report.tables[0].name, "codes");
  EXPECT_EQ(report.tables[1].name, "accum_steps");
  EXPECT_EQ(report.figures.size(), 2U);
  EXPECT_EQ(lab_named("homework2").folder, "reports/homework2");
}

}  // namespace
}  // namespace lockstep::cli::homework2_test
