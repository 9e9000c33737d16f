#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "cli/lab/homework2.hpp"
#include "cli/lab/homework2_answers.hpp"
#include "cli/lab/homework2_charts.hpp"
#include "cli/lab/homework2_plan.hpp"
#include "cli/lab/homework2_tables.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::made_set;
using test::mentions;
using test::names_of;
using test::row_with;
using test::value_of;

// A whole homework at ACCUM_STEPS 4 and 8, as an ideal run would leave it.
Homework2Results results_of(int ranks = 2, int shared_by = 1) {
  const auto set = [=](double ms, int64_t accum_steps, const char* amp, int64_t rows = 64,
                       double syncs = 1, double norm = 0.5) {
    return made_set({.ms = ms,
                     .accum_steps = accum_steps,
                     .rows = rows,
                     .amp = amp,
                     .syncs = syncs,
                     .norm = norm,
                     .ranks = ranks,
                     .shared_by = shared_by});
  };
  Homework2Results results;
  results.fp32 = set(100, 1, "off");
  results.amp = set(50, 1, "bf16");
  results.points = {{4, set(320, 4, "off"), set(160, 4, "bf16")},
                    {8, set(600, 8, "off"), set(300, 8, "bf16")}};
  results.synced = set(400, 4, "off", 64, 4);
  results.one_batch = set(310, 1, "off", 256);
  results.undivided = set(320, 4, "off", 64, 1, 2);
  results.undivided.runs[0].losses = {1.0, 2.0, 4.0, 8.0};
  return results;
}

std::string answer_to(const Homework2Results& results, const std::string& question_part) {
  return test::answer_with(answer_homework2(results), question_part);
}

size_t words_in(const std::string& text) {
  std::istringstream stream(text);
  size_t words = 0;
  for (std::string word; stream >> word;) ++words;
  return words;
}

TEST(Homework2Plan, RunsTheCodesAndTheirReferences) {
  const LabPlan plan = plan_homework2({.quick = true}, cores(2));
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
  const LabPlan plan = plan_homework2({.batch = 48, .hidden = 96, .accum_steps = {6, 2}}, cores(4));
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
    plan_homework2({.accum_steps = {1, 4}}, cores(2));
  });
  expect_error(Code::kUsage, {"--amp fp16 needs a GPU"},
               [] { plan_homework2({.amp = "fp16"}, cores(2)); });
  expect_error(Code::kSplit, {"--batch 2", "4 ranks", "--devices"},
               [] { plan_homework2({.devices = "cpu:4", .batch = 2}, cores(4)); });
}

TEST(Homework2Results, CollectsEveryRecordToItsSetUp) {
  const LabPlan plan = plan_homework2({.quick = true, .accum_steps = {8, 4}}, cores(2));
  const Finished finished = test::named_runs(plan);
  const Homework2Results results = collect_homework2(finished);
  const auto first = [](const RunSet& set_up) { return set_up.runs.at(0).program; };
  EXPECT_EQ(first(results.fp32), "fp32-run1");
  EXPECT_EQ(first(results.amp), "bf16-run1");
  EXPECT_EQ(first(results.synced), "accum4-sync-run1");
  EXPECT_EQ(first(results.one_batch), "rows-times4");
  EXPECT_EQ(first(results.undivided), "accum4-undivided");
  ASSERT_EQ(results.points.size(), 2U);
  EXPECT_EQ(results.points[0].accum_steps, 4);
  EXPECT_EQ(first(results.points[1].fp32), "accum8-run1");
  EXPECT_EQ(first(results.points[1].combined), "bf16-accum8-run1");
  EXPECT_EQ(results.points[1].combined.runs.size(), 2U);
  EXPECT_EQ(results.ranks(), 2);
}

TEST(Homework2Tables, CodesStandBesideEachOther) {
  Homework2Results results = results_of();
  results.amp.runs[0].losses[1] = 0.505;
  results.points[0].combined.runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  results.points[0].combined.runs[0].scale = 32768;
  const Table table = codes_table(results);
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
  Homework2Results results = results_of();
  for (auto& run : results.amp.runs) {
    run.memory.reset();
    run.scale.reset();
    run.losses[2] = std::numeric_limits<double>::quiet_NaN();
    run.nonfinite = 1;
  }
  const Table table = codes_table(results);
  EXPECT_EQ(row_with(table, "… weights")[3], "—");
  EXPECT_EQ(row_with(table, "… final scale")[3], "—");
  EXPECT_EQ(row_with(table, "stability: finite losses")[3], "3 of 4");
  EXPECT_EQ(row_with(table, "… largest loss deviation")[3], "not finite");
}

TEST(Homework2Tables, AccumStepsAreObserved) {
  const Table table = accum_steps_table(results_of());
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
  Homework2Results results = results_of();
  for (auto& run : results.points[1].fp32.runs) {
    run.step_ms.mean = 1280;
    for (auto& device : run.devices) device.peak_bytes = 60_MiB;
  }
  EXPECT_EQ(observe_fp32(results, results.points[1]), "100 % more time per row than 4, peak +50 %");
  for (auto& run : results.points[1].fp32.runs) run.step_ms.mean = 641;
  EXPECT_TRUE(mentions(observe_fp32(results, results.points[1]), "as fast per row as 4"));
  for (auto& run : results.points[1].combined.runs) run.step_ms.mean = 1282;
  EXPECT_EQ(observe_combined(results.points[1]), "0.50 × code 1's speed, peak -27 %");
}

TEST(Homework2Tables, NoiseAndABusyMachineAreWarnedAbout) {
  Homework2Results results = results_of();
  EXPECT_FALSE(mentions(codes_table(results).terminal(false), "Warning"));
  results.amp.runs[0].step_ms.mean = 90;
  results.others_busy_cores = 0.5;
  const std::string text = codes_table(results).terminal(false);
  EXPECT_TRUE(mentions(text, "Warning: step times varied")) << text;
  EXPECT_TRUE(mentions(text, "kept 0.5 cores busy")) << text;
}

TEST(Homework2Answers, ThreeOfThemShortAndWithFigures) {
  const auto answers = answer_homework2(results_of());
  ASSERT_EQ(answers.size(), 3U);
  for (const auto& answer : answers) {
    EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
    EXPECT_GE(words_in(answer.text), 60U) << answer.text;
    EXPECT_LE(words_in(answer.text), 120U) << answer.text;
  }
}

TEST(Homework2Answers, TimeIsSynchronisationAndPrecision) {
  const std::string text = answer_to(results_of(), "Execution time");
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
  Homework2Results slow = results_of();
  for (auto& run : slow.points[0].combined.runs) run.step_ms.mean = 400;
  EXPECT_FALSE(mentions(answer_to(slow, "Execution time"), "The two combine"));
  EXPECT_TRUE(mentions(answer_to(results_of(1), "Execution time"), "This run had one rank"));
  EXPECT_TRUE(mentions(answer_to(results_of(2, 2), "Execution time"),
                       "All 2 devices share the same hardware"));
}

TEST(Homework2Answers, MemoryIsSplit) {
  const std::string text = answer_to(results_of(), "Memory");
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
  Homework2Results other = results_of();
  for (auto& run : other.points[0].fp32.runs) run.memory->optimizer_state = 32_MiB;
  for (auto& run : other.amp.runs) {
    for (auto& device : run.devices) device.peak_bytes = 30_MiB;
  }
  EXPECT_TRUE(mentions(answer_to(other, "Memory"), "32.0 MiB of optimizer state in fp32"));
  EXPECT_FALSE(mentions(answer_to(other, "Memory"), "With so few rows"));
  for (auto& run : other.amp.runs) run.memory.reset();
  EXPECT_TRUE(mentions(answer_to(other, "Memory"), "did not record what their peaks are made of"));
}

TEST(Homework2Answers, TheEffectiveBatchAndItsDivisor) {
  const std::string text = answer_to(results_of(), "Effective batch");
  EXPECT_TRUE(mentions(text, "64 rows became 256 at 4 and 512 at 8, with one update each")) << text;
  EXPECT_TRUE(mentions(text, "norm was 2 instead of 0.5: 4.00 times")) << text;
  EXPECT_TRUE(mentions(text, "the loss ended at 8 instead of 0.2.")) << text;
  EXPECT_TRUE(mentions(text,
                       "Divided, it was equal to that of one batch of 256 rows, and the "
                       "losses differed by at most 0 %."))
      << text;
  Homework2Results other = results_of();
  other.one_batch.runs[0].gradient_check->norm = 0.4;
  other.undivided.runs[0].nonfinite = 1;
  other.points.resize(1);
  const std::string changed = answer_to(other, "Effective batch");
  EXPECT_TRUE(mentions(changed, "it was 1.250 times that of one batch")) << changed;
  EXPECT_TRUE(mentions(changed, "the loss did not stay finite.")) << changed;
  EXPECT_TRUE(mentions(changed, "became 256 at 4, with one update each")) << changed;
  for (auto& run : other.undivided.runs) run.gradient_check.reset();
  EXPECT_TRUE(mentions(answer_to(other, "Effective batch"), "did not record their gradients"));
}

TEST(Homework2Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  Homework2Results bare = results_of();
  std::vector<RunSet*> all = {&bare.fp32, &bare.amp, &bare.synced, &bare.one_batch,
                              &bare.undivided};
  for (auto& point : bare.points) all.insert(all.end(), {&point.fp32, &point.combined});
  for (auto* set_up : all) {
    for (auto& run : set_up->runs) {
      run.memory.reset();
      run.gradient_check.reset();
      run.scale.reset();
      run.losses.clear();
      run.all_reduces = {};
      run.step_ms = {};
    }
  }
  for (const auto& results : {results_of(1), results_of(2, 2), bare}) {
    const LabReport report = homework2_report(results);
    EXPECT_EQ(report.answers.size(), 3U);
    EXPECT_EQ(report.tables.size(), 2U);
    for (const auto& answer : report.answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
    }
  }
}

TEST(Homework2Figures, TimeAndMemoryOverAccumSteps) {
  const auto figures = homework2_figures(results_of());
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
  const LabReport report = homework2_report(results_of());
  EXPECT_EQ(report.title, "Homework 2: accumulation and mixed precision");
  EXPECT_EQ(report.tables[0].name, "codes");
  EXPECT_EQ(report.tables[1].name, "accum_steps");
  EXPECT_EQ(report.figures.size(), 2U);
  EXPECT_EQ(homework2().folder, "reports/homework2");
}

}  // namespace
}  // namespace lockstep::cli
