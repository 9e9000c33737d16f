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
                       double syncs = 1) {
    return made_set({.ms = ms,
                     .accum_steps = accum_steps,
                     .rows = rows,
                     .amp = amp,
                     .syncs = syncs,
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
  test::add_studies(results, {.ranks = ranks, .shared_by = shared_by}, {512});
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
  ASSERT_EQ(names.size(), 28U);
  EXPECT_EQ(
      std::vector<std::string>(names.begin(), names.begin() + 17),
      (std::vector<std::string>{
          "fp32-run1", "bf16-run1", "accum4-run1", "bf16-accum4-run1", "accum8-run1",
          "bf16-accum8-run1", "accum16-run1", "bf16-accum16-run1", "accum32-run1",
          "bf16-accum32-run1", "accum4-sync-run1", "rows-times4", "small-lr0.9",
          "small-lr0.9-undivided", "small-lr3.6", "deep-fp32-rows4096", "deep-bf16-rows4096"}));
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
  EXPECT_EQ(first("undivided"), "small-lr0.9-undivided");
  ASSERT_EQ(results.all("accumulated").size(), 2U);
  EXPECT_EQ(results.all("accumulated")[0].size, 4);
  EXPECT_EQ(first_program(results.of("accumulated", 8)), "accum8-run1");
  EXPECT_EQ(first_program(results.of("combined", 8)), "bf16-accum8-run1");
  EXPECT_EQ(results.of("combined", 8).runs.size(), 2U);
  EXPECT_EQ(results.of("fp32").devices, 2);
}

std::vector<std::string> headers_of(const Table& table) {
  std::vector<std::string> headers;
  for (const auto& column : table.columns()) headers.push_back(column.header);
  return headers;
}

TEST(Homework2Tables, TableAHasTheColumnsAndUnitsOfTheCourse) {
  LabRuns results = results_of();
  set_up(results, "amp").runs[0].losses[1] = 0.505;
  set_up(results, "combined").runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  const Table table = kLab.table(results, "codes");
  using Row = std::vector<std::string>;
  EXPECT_EQ(headers_of(table), (Row{"code", "time (s)", "s per 1000 rows", "memory (GB)",
                                    "stability", "skipped", "loss gap"}));
  ASSERT_EQ(table.rows().size(), 4U);
  EXPECT_EQ(table.rows()[0],
            (Row{"1: accumulation", "2.56 ± 0.00", "1.25 ± 0.00", "0.0419", "stable", "—", "0 %"}));
  EXPECT_EQ(table.rows()[1],
            (Row{"2: AMP", "0.400 ± 0.000", "0.781 ± 0.000", "0.0461", "stable", "0", "1 %"}));
  EXPECT_EQ(table.rows()[2][5], "1");
  EXPECT_EQ(table.rows()[3][4], "stable");
  EXPECT_EQ(table.rows()[3][6], "—") << "it is the reference";
}

TEST(Homework2Tables, StabilityIsJudged) {
  LabRuns results = results_of();
  for (auto& run : set_up(results, "amp").runs) {
    run.losses[2] = std::numeric_limits<double>::quiet_NaN();
    run.nonfinite = 1;
  }
  set_up(results, "accumulated").runs[0].losses[1] = 0.6;
  const Table table = kLab.table(results, "codes");
  EXPECT_EQ(row_with(table, "2: AMP")[4], "unstable: 1 of 4 losses not finite");
  EXPECT_EQ(row_with(table, "1: accumulation")[4], "differs from fp32");
  EXPECT_EQ(row_with(table, "1: accumulation")[6], "20 %");
}

TEST(Homework2Tables, TableBHasTotalTimesAndObservations) {
  const Table table = kLab.table(results_of(), "accum_steps");
  using Row = std::vector<std::string>;
  EXPECT_EQ(headers_of(table), (Row{"ACCUM_STEPS", "code", "total time (s)", "s per 1000 rows",
                                    "memory (GB)", "observations"}));
  ASSERT_EQ(table.rows().size(), 4U);
  EXPECT_EQ(table.rows()[0], (Row{"4", "1", "2.56 ± 0.00", "1.25 ± 0.00", "0.0419",
                                  "20 % less time per row than fp32 alone, same peak"}));
  EXPECT_EQ(table.rows()[1], (Row{"4", "3", "1.28 ± 0.00", "0.625 ± 0.000", "0.0461",
                                  "50 % less time per row than code 1, peak +10 %"}));
  EXPECT_EQ(table.rows()[2], (Row{"8", "1", "4.80 ± 0.00", "1.17 ± 0.00", "0.0419",
                                  "6 % less time per row than 4, same peak"}));
}

std::string observed(LabRuns& results, double ms, double deviation_ms) {
  for (auto& run : set_up(results, "accumulated", 1).runs) {
    run.step_ms.mean = ms;
    run.step_ms.stddev = deviation_ms;
  }
  return kLab.table(results, "accum_steps").rows()[2].back();
}

TEST(Homework2Tables, ObservationsFollowTheFiguresAndTheirNoise) {
  LabRuns results = results_of();
  EXPECT_EQ(observed(results, 641, 5), "same time per row as 4, same peak");
  const std::string noisy = observed(results, 832, 300);  // 104 ms a micro-step against 80
  EXPECT_TRUE(noisy.starts_with("no clear difference in time from 4, same peak; noisy: ± "))
      << noisy;
  for (auto& run : set_up(results, "accumulated", 1).runs) {
    for (auto& device : run.devices) device.peak_bytes = 60_MiB;
  }
  EXPECT_EQ(observed(results, 1280, 5), "100 % more time per row than 4, peak +50 %");
}

TEST(Homework2Report, ABusyMachineIsSaidOnceAndNoCauseIsNamed) {
  LabRuns results = results_of();
  EXPECT_TRUE(kLab.report(results).warning.empty());
  results.others_busy_cores = 0.5;
  const LabReport report = kLab.report(results);
  EXPECT_TRUE(mentions(report.warning, "cannot be judged")) << report.warning;
  for (const auto& table : report.tables) {
    EXPECT_FALSE(mentions(table.table.terminal(false), "Warning")) << table.name;
    EXPECT_FALSE(mentions(table.table.terminal(false), "time per row than")) << table.name;
  }
  for (const auto& answer : report.answers) {
    for (const char* said :
         {"other programs", "proves little", "times as fast", "The two combine"}) {
      EXPECT_FALSE(mentions(answer.text, said)) << answer.text;
    }
  }
}

TEST(Homework2Answers, ThreeOfThemShortAndWithFigures) {
  const auto answers = kLab.report(results_of()).answers;
  ASSERT_EQ(answers.size(), 3U);
  for (const auto& answer : answers) {
    EXPECT_TRUE(test::reads_well(answer.text)) << answer.text;
    EXPECT_GE(words_in(answer.text), 60U) << answer.text;
    EXPECT_LE(words_in(answer.text), 150U) << answer.text;
  }
}

TEST(Homework2Answers, TimeIsSynchronisationAndPrecision) {
  const std::string text = kLab.answer(results_of(), "Execution time");
  EXPECT_TRUE(
      text.starts_with("1000 rows took 1.25 s with code 1, 781 ms with code 2 and 625 ms with "
                       "code 3, against 1.56 s in plain fp32."))
      << text;
  EXPECT_TRUE(mentions(text,
                       "every 64 rows cost 2 all-reduces (16.0 MiB), with ACCUM_STEPS 4 "
                       "every 256 rows do."))
      << text;
  EXPECT_TRUE(mentions(text, "went from 10 to 3 % of the step")) << text;
  EXPECT_TRUE(mentions(text, "Without no_sync, code 1 was 1.25 times slower than with it."))
      << text;
  EXPECT_TRUE(mentions(text,
                       "code 2 was 2.00 times as fast as fp32, and code 3 2.00 times as fast "
                       "as code 1."))
      << text;
  EXPECT_TRUE(mentions(text, "The two combine")) << text;
  LabRuns even = results_of();
  for (auto& run : set_up(even, "fp32").runs) run.exposed_comm_ms = 3.125;
  EXPECT_TRUE(mentions(kLab.answer(even, "Execution time"), "hid stayed at 3 % of the step."));
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
  EXPECT_TRUE(mentions(text, "with 512 rows a step took 72.0 MiB in bf16 against 96.0 MiB"))
      << text;
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
  EXPECT_TRUE(
      mentions(text, "norm was that of one batch of 256 rows, and the losses were the same."))
      << text;
  EXPECT_TRUE(mentions(text, "in effect ACCUM_STEPS times what was chosen")) << text;
  EXPECT_TRUE(mentions(text, "(4.00 times), and training diverged: from step 5 on")) << text;
  LabRuns other = results_of();
  set_up(other, "one_batch").runs[0].gradient_check->norm = 0.4;
  set_up(other, "one_batch").runs[0].losses[1] = 0.4;
  other.sets["accumulated"].resize(1);
  other.sets["combined"].resize(1);
  const std::string changed = kLab.answer(other, "Effective batch");
  EXPECT_TRUE(mentions(changed, "norm was 1.250 times that of one batch")) << changed;
  EXPECT_TRUE(mentions(changed, "the losses differed by at most 25 %.")) << changed;
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
  ASSERT_EQ(report.code.size(), 3U);
  EXPECT_TRUE(report.code[0].printed);
  EXPECT_FALSE(report.code[1].printed) << "a file beside the report";
  EXPECT_EQ(report.code[0].name, "homework2_combined.cpp");
  EXPECT_TRUE(mentions(report.code[0].text, "scaler.scale(loss / divisor).backward()"));
  EXPECT_EQ(report.trained.back().second, "lockstep lab homework2 --accum-steps 4,8 --amp bf16");
  EXPECT_EQ(lab_named("homework2").folder, "reports/homework2");
}

TEST(Homework2Report, NamesWhatAnIncompleteFolderLacks) {
  kLab.expect_missing_runs_are_named(results_of());
}

}  // namespace
}  // namespace lockstep::cli::homework2_test
