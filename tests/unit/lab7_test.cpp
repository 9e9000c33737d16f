#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "cli/lab7.hpp"
#include "cli/lab7_answers.hpp"
#include "cli/lab7_charts.hpp"
#include "cli/lab7_plan.hpp"
#include "cli/lab7_tables.hpp"
#include "cli/lab_command.hpp"
#include "cli/lab_measures.hpp"
#include "cli/lab_text.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::made_set;
using test::MadeRun;
using test::mentions;
using test::names_of;
using test::row_with;
using test::value_of;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A whole lab, as an ideal run on two ranks would leave it.
Lab7Results results_of(const MadeRun& like = {}) {
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
  Lab7Results results;
  results.fp32 = made_set(plain);
  results.amp = made_set(low);
  AccumulationRuns runs{.micro_steps = 4};
  runs.no_sync = made_set(many);
  runs.synced =
      made_set(with([](MadeRun& run) { run.accum_steps = 4, run.ms = 400, run.syncs = 4; }));
  runs.undivided =
      made_set(with([](MadeRun& run) { run.accum_steps = 4, run.ms = 320, run.norm = 2; }), 1);
  runs.undivided.runs[0].losses = {1.0, 2.0, 4.0, 8.0};
  runs.one_batch = made_set(with([](MadeRun& run) { run.rows = 256, run.ms = 310; }));
  results.accumulations = {runs};
  results.combined =
      made_set(with([&amp](MadeRun& run) { run.accum_steps = 4, run.amp = amp, run.ms = 160; }));
  results.no_scaler = made_set(low, 1);
  results.no_scaler.runs[0].scale.reset();
  results.overflow_at = 2;
  results.overflow = made_set(low, 1);
  results.overflow.runs[0].scale = 32768;
  results.overflow.runs[0].skipped_steps = {{2, "layers.0.weight", 65536, 32768}};
  results.overflow_no_scaler = made_set(low, 1);
  results.overflow_no_scaler.runs[0].scale.reset();
  results.overflow_no_scaler.runs[0].losses = {1.0, 0.5, kNan, kNan};
  results.overflow_no_scaler.runs[0].nonfinite = 2;
  return results;
}

std::string answer_to(const Lab7Results& results, const std::string& question_part) {
  return test::answer_with(answer_lab7(results), question_part);
}

std::set<std::string> programs_of(const LabPlan& plan) {
  std::set<std::string> programs;
  for (const auto& experiment : plan.experiments) programs.insert(experiment.program);
  return programs;
}

TEST(Lab7Plan, QuickRunsEveryVariantTheQuestionsNeed) {
  const LabPlan plan = plan_lab7({.quick = true}, cores(2));
  EXPECT_EQ(names_of(plan),
            (std::vector<std::string>{
                "fp32-run1", "bf16-run1", "accum4-run1", "accum4-sync-run1", "rows-times4-run1",
                "bf16-accum4-run1", "accum4-undivided", "bf16-no-scaler", "bf16-overflow4",
                "bf16-no-scaler-overflow4", "fp32-run2", "bf16-run2", "accum4-run2",
                "accum4-sync-run2", "rows-times4-run2", "bf16-accum4-run2"}));
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
  const LabPlan plan = plan_lab7({.quick = true, .steps = 10, .batch = 32, .dim = 8}, cores(2));
  const auto tail = [&plan](const std::string& name) {
    const auto& words = experiment_named(plan, name).arguments;
    const auto quiet = std::find(words.begin(), words.end(), "--quiet");
    return quiet == words.end() ? words : std::vector<std::string>(quiet + 1, words.end());
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(tail("fp32-run1"), (Words{"--accum-steps", "1"}));
  EXPECT_EQ(tail("bf16-run1"), (Words{"--amp", "bf16"}));
  EXPECT_EQ(tail("accum4-sync-run1"), (Words{"--accum-steps", "4", "--sync-every-step"}));
  EXPECT_EQ(tail("accum4-undivided"), (Words{"--accum-steps", "4", "--no-divide"}));
  EXPECT_EQ(tail("bf16-accum4-run2"), (Words{"--accum-steps", "4", "--amp", "bf16"}));
  EXPECT_EQ(tail("bf16-no-scaler-overflow5"),
            (Words{"--amp", "bf16", "--no-scaler", "--overflow-at", "5"}));
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--batch"), "32");
  EXPECT_EQ(value_of(experiment_named(plan, "rows-times4-run1"), "--batch"), "128")
      << "one batch as large as four micro-steps";
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--steps"), "10");
  EXPECT_EQ(value_of(experiment_named(plan, "accum4-run1"), "--dim"), "8");
}

TEST(Lab7Plan, TheFullFormIsLongerAndKeepsWhatIsAsked) {
  const LabPlan plan = plan_lab7({}, cores(2));
  EXPECT_EQ(plan.repetitions, 3);
  EXPECT_FALSE(experiment_named(plan, "accum8-sync-run3").name.empty());
  const LabPlan asked = plan_lab7({.accum_steps = {6, 3, 3}}, cores(2));
  EXPECT_FALSE(experiment_named(asked, "accum3-run1").name.empty());
  EXPECT_FALSE(experiment_named(asked, "rows-times6-run1").name.empty());
  EXPECT_FALSE(experiment_named(asked, "bf16-accum3-run1").name.empty()) << "the fewest";
  EXPECT_TRUE(experiment_named(asked, "accum4-run1").name.empty());
  EXPECT_FALSE(experiment_named(plan_lab7({.steps = 1}, cores(2)), "bf16-overflow1").name.empty());
}

TEST(Lab7Plan, DevicesDecideRanksAndPrecision) {
  const auto ranks = [](const LabOptions& options, const Hardware& hardware) {
    return plan_lab7(options, hardware).experiments.front().ranks;
  };
  EXPECT_EQ(ranks({}, cores(8)), 2);
  EXPECT_EQ(ranks({.devices = "cpu:3"}, cores(8)), 3);
  EXPECT_EQ(ranks({}, cores(8, 4)), 4);
  EXPECT_EQ(ranks({}, cores(8, 1)), 1);
  EXPECT_FALSE(experiment_named(plan_lab7({}, cores(8, 1)), "fp16-run1").name.empty());
  EXPECT_FALSE(experiment_named(plan_lab7({.amp = "bf16"}, cores(8, 1)), "bf16-run1").name.empty());
}

TEST(Lab7Plan, BadValuesAreNamedWithARemedy) {
  expect_error(Code::kUsage, {"--amp fp8", "bf16 or fp16"},
               [] { plan_lab7({.amp = "fp8"}, cores(2)); });
  expect_error(Code::kUsage, {"--amp off"}, [] { plan_lab7({.amp = "off"}, cores(2)); });
  expect_error(Code::kUsage, {"--amp fp16 needs a GPU", "--amp bf16"},
               [] { plan_lab7({.amp = "fp16"}, cores(2)); });
  expect_error(Code::kUsage, {"--accum-steps 1", "from 2 on"}, [] {
    plan_lab7({.accum_steps = {4, 1}}, cores(2));
  });
  expect_error(Code::kSplit, {"--batch 1", "2 ranks"}, [] { plan_lab7({.batch = 1}, cores(2)); });
}

TEST(LabCommand, LabsOfIssueFiveHaveTheirFlags) {
  const auto run = [](const LabRequest& request) {
    return [request] { run_lab_command(request, "lockstep lab"); };
  };
  expect_error(Code::kUsage, {"there is no lab \"8\"", "5, 6, 7, 10 and homework2", "lab all"},
               run({"8", {}}));
  expect_error(Code::kUsage, {"lab 7 has no --ranks", "belongs to lab 6"},
               run({"7", {.ranks = {2}}}));
  expect_error(Code::kUsage, {"lab homework2 has no --split-rows", "belongs to lab 5"},
               run({"homework2", {.split_rows = 9}}));
  expect_error(Code::kUsage, {"lab 5 has no --amp", "belongs to lab 7 and lab homework2"},
               run({"5", {.amp = "bf16"}}));
  expect_error(Code::kUsage, {"lab 6 has no --accum-steps"}, run({"6", {.accum_steps = {4}}}));
}

TEST(Lab7Results, CollectsEveryRecordToItsSetUp) {
  const LabPlan plan = plan_lab7({.accum_steps = {8, 4}}, cores(2));
  const Finished finished = test::named_runs(plan);
  const Lab7Results results = collect_lab7(finished);
  const auto first = [](const RunSet& set_up) { return set_up.runs.at(0).program; };
  EXPECT_EQ(first(results.fp32), "fp32-run1");
  EXPECT_EQ(first(results.amp), "bf16-run1");
  EXPECT_EQ(first(results.combined), "bf16-accum4-run1");
  EXPECT_EQ(first(results.no_scaler), "bf16-no-scaler");
  EXPECT_EQ(first(results.overflow), "bf16-overflow10");
  EXPECT_EQ(first(results.overflow_no_scaler), "bf16-no-scaler-overflow10");
  EXPECT_EQ(results.overflow_at, 10);
  ASSERT_EQ(results.accumulations.size(), 2U);
  EXPECT_EQ(results.accumulations[0].micro_steps, 4);
  EXPECT_EQ(first(results.accumulations[1].no_sync), "accum8-run1");
  EXPECT_EQ(first(results.accumulations[1].synced), "accum8-sync-run1");
  EXPECT_EQ(first(results.accumulations[1].undivided), "accum8-undivided");
  EXPECT_EQ(first(results.accumulations[1].one_batch), "rows-times8-run1");
  EXPECT_EQ(results.fp32.runs.size(), 3U);
  EXPECT_EQ(results.fp32.devices, 2);
}

TEST(LabMeasures, CompareWhatHasDifferentRows) {
  const Lab7Results results = results_of();
  EXPECT_DOUBLE_EQ(rows_per_s(results.fp32), 640);
  EXPECT_DOUBLE_EQ(rows_per_s(results.first().no_sync), 800);
  EXPECT_DOUBLE_EQ(compare_per_row(results.fp32, results.first().no_sync).speedup.mean, 1.25);
  EXPECT_DOUBLE_EQ(norm_ratio(results.first().no_sync, results.first().undivided).value(), 4);
  EXPECT_EQ(peak_of(results.fp32), 40_MiB);
  EXPECT_DOUBLE_EQ(relative_change(40_MiB, 30_MiB), -0.25);
  EXPECT_DOUBLE_EQ(relative_change(0, 30_MiB), 0);
}

TEST(LabMeasures, LossesDeviateOrCannotBeCompared) {
  RunRecord one = test::made_run({});
  RunRecord other = one;
  EXPECT_DOUBLE_EQ(loss_deviation(one, other).value(), 0);
  other.losses[1] = 0.55;
  EXPECT_NEAR(loss_deviation(one, other).value(), 0.1, 1e-12);
  other.losses[3] = kNan;
  EXPECT_FALSE(loss_deviation(one, other));
  other.losses.resize(2);
  EXPECT_FALSE(loss_deviation(one, other)) << "of another length";
  one.losses.clear();
  EXPECT_FALSE(loss_deviation(one, one));
}

TEST(LabText, SharesAndChanges) {
  EXPECT_EQ(format_share(0), "0 %");
  EXPECT_EQ(format_share(1e-9), "< 0.001 %");
  EXPECT_EQ(format_share(0.00012), "0.012 %");
  EXPECT_EQ(format_share(0.1234), "12 %");
  EXPECT_EQ(format_share(1.4), "140 %");
  EXPECT_EQ(format_change(-0.284), "-28 %");
  EXPECT_EQ(format_change(0.001), "±0 %");
  const auto against = [](double base_ms, double ms) {
    return format_against(compare(made_set({.ms = base_ms}), made_set({.ms = ms})), "fp32");
  };
  EXPECT_EQ(against(100, 50), "2.00 times as fast as fp32");
  EXPECT_EQ(against(100, 125), "1.25 times slower than fp32");
  EXPECT_EQ(against(100, 99), "no faster than fp32 within the noise (1.01 ± 0.00 times)");
}

TEST(Lab7Tables, BothTechniquesSideBySide) {
  const Table table = techniques_table(results_of());
  EXPECT_EQ(row_with(table, "goal")[1], "a batch of 256 rows in the memory of 64");
  EXPECT_EQ(row_with(table, "peak memory"),
            (std::vector<std::string>{"peak memory", "40.0 MiB", "44.0 MiB"}));
  EXPECT_EQ(row_with(table, "… against")[1], "64.0 MiB in one batch of 256 rows: -38 %");
  EXPECT_EQ(row_with(table, "… against")[2], "40.0 MiB in fp32: +10 %");
  EXPECT_EQ(row_with(table, "speed")[1], "1.25 ± 0.00 × the rows/s of fp32");
  EXPECT_EQ(row_with(table, "speed")[2], "2.00 ± 0.00 × the rows/s of fp32");
  EXPECT_EQ(row_with(table, "communication")[1], "2 all-reduces, 16.0 MiB for 256 rows");
  EXPECT_EQ(table.rows().back()[1], "8 all-reduces, 64.0 MiB if each micro-step syncs");
  EXPECT_EQ(table.rows().back()[2], "2 all-reduces, 16.0 MiB in fp32");
}

TEST(Lab7Tables, WaysToALargeBatch) {
  const Table table = accumulation_table(results_of());
  EXPECT_EQ(table.rows().size(), 5U);
  EXPECT_EQ(row_with(table, "fp32 alone"),
            (std::vector<std::string>{"fp32 alone", "1 × 64", "100 ± 0 ms", "640", "2", "16.0 MiB",
                                      "10.0 ms", "0.5", "40.0 MiB"}));
  EXPECT_EQ(row_with(table, "sync each"),
            (std::vector<std::string>{"sync each", "4 × 64", "400 ± 0 ms", "640", "8", "64.0 MiB",
                                      "40.0 ms", "0.5 (1.000 ×)", "40.0 MiB"}));
  EXPECT_EQ(row_with(table, "undivided")[7], "2 (4.000 ×)");
  EXPECT_EQ(row_with(table, "one batch")[1], "1 × 256");
  EXPECT_EQ(row_with(table, "one batch").back(), "64.0 MiB");
}

TEST(Lab7Tables, StabilityIsCounted) {
  const Table table = precision_table(results_of());
  EXPECT_EQ(row_with(table, "fp32"),
            (std::vector<std::string>{"fp32", "100 ± 0 ms", "1", "—", "—", "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "bf16, scaler"),
            (std::vector<std::string>{"bf16, scaler", "50.0 ± 0.0 ms", "2.00 ± 0.00", "0", "65536",
                                      "0 of 4", "0.2"}));
  EXPECT_EQ(row_with(table, "bf16, no scaler")[2], "—") << "it ran once";
  EXPECT_EQ(row_with(table, "overflow in step 2, scaler")[3], "1");
  EXPECT_EQ(row_with(table, "overflow in step 2, scaler")[4], "32768");
  const auto without = row_with(table, "overflow in step 2, no scaler");
  EXPECT_EQ(without[5], "2 of 4");
  EXPECT_EQ(without[6], "not finite");
}

TEST(Lab7Tables, MemoryAndGradientsAreSplit) {
  const Lab7Results results = results_of();
  EXPECT_EQ(row_with(memory_split_table(results), "bf16"),
            (std::vector<std::string>{"bf16", "44.0 MiB", "16.0 MiB", "16.0 MiB", "0 B", "8.00 MiB",
                                      "4.00 MiB"}));
  EXPECT_EQ(row_with(memory_split_table(results), "one batch of 256").back(), "32.0 MiB");
  const Table gradients = gradients_table(results);
  EXPECT_EQ(row_with(gradients, "fp32"),
            (std::vector<std::string>{"fp32", "4000000", "0.1 %", "12 %", "0.03 %", "0 %"}));
  EXPECT_TRUE(mentions(gradients.notes().front(), "No run here used fp16"));
  EXPECT_FALSE(
      mentions(gradients_table(results_of({.amp = "fp16"})).notes().front(), "No run here"));
}

TEST(Lab7Tables, NoiseAndABusyMachineAreWarnedAbout) {
  Lab7Results results = results_of();
  for (const auto& table : lab7_report(results).tables) {
    EXPECT_FALSE(mentions(table.table.terminal(false), "Warning")) << table.name;
  }
  results.amp.runs[0].step_ms.mean = 90;
  EXPECT_TRUE(mentions(precision_table(results).terminal(false), "Warning: step times varied"));
  results.others_busy_cores = 1;
  EXPECT_TRUE(mentions(accumulation_table(results).terminal(false), "kept 1.0 cores busy"));
}

TEST(Lab7Answers, EveryQuestionIsAnsweredWhateverTheRunHas) {
  Lab7Results bare = results_of();
  std::vector<RunSet*> all = {&bare.fp32,      &bare.amp,      &bare.combined,
                              &bare.no_scaler, &bare.overflow, &bare.overflow_no_scaler};
  for (auto& runs : bare.accumulations) {
    for (auto* set_up : {&runs.no_sync, &runs.synced, &runs.undivided, &runs.one_batch}) {
      all.push_back(set_up);
    }
  }
  for (auto* set_up : all) {
    for (auto& run : set_up->runs) {
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
  for (const auto& results : {results_of(), results_of({.amp = "fp16"}), results_of({.ranks = 1}),
                              results_of({.shared_by = 2}), bare}) {
    const auto answers = answer_lab7(results);
    EXPECT_EQ(answers.size(), 10U);
    for (const auto& answer : answers) {
      EXPECT_TRUE(test::reads_well(answer.text)) << answer.question << "\n" << answer.text;
    }
    EXPECT_EQ(lab7_report(results).tables.size(), 5U);
  }
}

TEST(Lab7Answers, TheLossIsDividedAndTheNormsShowWhy) {
  const std::string text = answer_to(results_of(), "divided");
  EXPECT_TRUE(mentions(text, "4 micro-steps give the sum of 4 means")) << text;
  EXPECT_TRUE(mentions(text, "the norm 2 instead of 0.5, 4.00 times as much")) << text;
  EXPECT_TRUE(mentions(text, "Its loss after 4 steps was 8 instead of 0.2.")) << text;
  EXPECT_TRUE(mentions(text, "One batch of 256 rows gave 0.5: accumulation is equivalent")) << text;
  Lab7Results other = results_of();
  other.accumulations[0].one_batch.runs[0].gradient_check->norm = 0.4;
  other.accumulations[0].undivided.runs[0].nonfinite = 1;
  EXPECT_TRUE(
      mentions(answer_to(other, "divided"), "gave 0.4: norm and losses are up to 25 % apart"));
  EXPECT_TRUE(mentions(answer_to(other, "divided"), "Its loss did not stay finite."));
  Lab7Results other_rows = results_of();
  other_rows.accumulations[0].one_batch.runs[0].losses[1] = 0.4;
  EXPECT_TRUE(mentions(answer_to(other_rows, "divided"), "up to 25 % apart"));
  other.accumulations[0].undivided.runs[0].gradient_check.reset();
  EXPECT_TRUE(mentions(answer_to(other, "divided"), "did not record its gradients"));
}

TEST(Lab7Answers, SynchronisationIsCounted) {
  const std::string skipped = answer_to(results_of(), "skipped");
  EXPECT_TRUE(mentions(skipped, "made 2 all-reduces of together 16.0 MiB")) << skipped;
  EXPECT_TRUE(mentions(skipped, "4 micro-steps made 8 of together 64.0 MiB")) << skipped;
  EXPECT_TRUE(mentions(skipped, "The gradient was the same.")) << skipped;
  const std::string without = answer_to(results_of(), "without no_sync");
  EXPECT_TRUE(mentions(without, "64.0 MiB per optimizer step instead of 16.0 MiB")) << without;
  EXPECT_TRUE(mentions(without, "took 40.0 ms instead of 10.0 ms")) << without;
  EXPECT_TRUE(mentions(without, "1.25 times slower than with no_sync")) << without;
  Lab7Results wrong = results_of();
  wrong.accumulations[0].synced.runs[0].gradient_check->norm = 1;
  EXPECT_TRUE(mentions(answer_to(wrong, "skipped"), "100 % apart"));
}

TEST(Lab7Answers, OneRankAndSharedHardwareAreNotSoldAsMore) {
  const Lab7Results one = results_of({.ranks = 1});
  for (const char* question : {"skipped", "without no_sync"}) {
    EXPECT_TRUE(mentions(answer_to(one, question), "This run had one rank")) << question;
  }
  EXPECT_TRUE(mentions(answer_to(one, "compare"), "With one rank neither communicates."));
  EXPECT_TRUE(mentions(answer_to(one, "more speed"), "with several ranks communication"));
  const Lab7Results shared = results_of({.shared_by = 2});
  for (const char* question : {"without no_sync", "more speed"}) {
    EXPECT_TRUE(mentions(answer_to(shared, question), "All 2 devices share the same hardware"))
        << question;
  }
}

TEST(Lab7Answers, PrecisionIsMeasured) {
  const std::string why = answer_to(results_of(), "Why mixed");
  EXPECT_TRUE(mentions(why, "50.0 ms in bf16 and 100 ms in fp32: 2.00 times as fast as fp32"))
      << why;
  EXPECT_TRUE(mentions(why, "temporaries took 4.00 MiB against 8.00 MiB, and 8.00 MiB of low"))
      << why;
  EXPECT_TRUE(mentions(why, "All 4 losses equal fp32's exactly.")) << why;
  Lab7Results uncopied = results_of();
  for (auto& run : uncopied.amp.runs) run.memory->low_precision = 0;
  EXPECT_FALSE(mentions(answer_to(uncopied, "Why mixed"), "low-precision"));
  Lab7Results slow = results_of();
  for (auto& run : slow.amp.runs) run.step_ms.mean = 200;
  EXPECT_TRUE(mentions(answer_to(slow, "Why mixed"), "2.00 times slower than fp32"));
}

TEST(Lab7Answers, TheScalersReasonIsInTheGradients) {
  const std::string bf16 = answer_to(results_of(), "Why is a GradScaler");
  EXPECT_TRUE(mentions(bf16,
                       "Of the 4000000 gradient values of the first fp32 step fp16 would "
                       "lose 12 %, and 0.03 % after multiplication by 65536"))
      << bf16;
  EXPECT_TRUE(mentions(bf16, "none would then be too large")) << bf16;
  EXPECT_TRUE(mentions(bf16, "The run itself computed in bf16")) << bf16;
  Lab7Results large = results_of();
  large.fp32.runs[0].gradient_check->fp16_overflow_scaled = 0.02;
  large.fp32.runs[0].gradient_check->fp16_lost_scaled = 1e-9;
  const std::string text = answer_to(large, "Why is a GradScaler");
  EXPECT_TRUE(mentions(text, "and less than 0.001 % after")) << text;
  EXPECT_TRUE(mentions(text, "2 % would then be too large for it, which is why")) << text;
  EXPECT_FALSE(mentions(answer_to(results_of({.amp = "fp16"}), "Why is a GradScaler"), "bf16"));
}

TEST(Lab7Answers, WithoutAScalerAnOverflowReachesTheWeights) {
  const std::string text = answer_to(results_of(), "What happens without it");
  EXPECT_TRUE(text.starts_with("Small gradients would vanish in fp16; in bf16")) << text;
  EXPECT_TRUE(mentions(text,
                       "planted in step 2: the scaler skipped that step (it named "
                       "layers.0.weight, and the scale went from 65536 to 32768), and 4 of 4 "
                       "losses were finite."))
      << text;
  EXPECT_TRUE(mentions(text, "reached the weights, and 2 of 4 losses were not finite.")) << text;

  Lab7Results fp16 = results_of({.amp = "fp16"});
  fp16.no_scaler.runs[0].gradient_check->zero_share = 0.3;
  EXPECT_TRUE(mentions(answer_to(fp16, "What happens without it"),
                       "30 % of the first gradient's values were 0 without a scaler and 0.1 %"));

  Lab7Results missed = results_of();
  missed.overflow.runs[0].skipped_steps[0].step = 3;
  missed.overflow_no_scaler.runs[0].nonfinite = 0;
  const std::string honest = answer_to(missed, "What happens without it");
  EXPECT_TRUE(mentions(honest, "planted in step 2 was not skipped in this run.")) << honest;
  EXPECT_TRUE(mentions(honest, "no loss became infinite either.")) << honest;
}

TEST(Lab7Answers, ComparisonsFollowTheFigures) {
  EXPECT_TRUE(answer_to(results_of(), "more memory").starts_with("Accumulation, in this run."));
  EXPECT_TRUE(answer_to(results_of(), "more speed").starts_with("Mixed precision, in this run."));
  Lab7Results other = results_of();
  for (auto& run : other.amp.runs) {
    run.step_ms.mean = 81;
    for (auto& device : run.devices) device.peak_bytes = 10_MiB;
  }
  EXPECT_TRUE(answer_to(other, "more memory").starts_with("Mixed precision, in this run."));
  EXPECT_TRUE(answer_to(other, "more speed").starts_with("Neither clearly, in this run."));
  for (auto& run : other.amp.runs) run.step_ms.mean = 120;
  EXPECT_TRUE(answer_to(other, "more speed").starts_with("Accumulation, in this run."));
  for (auto& device : other.amp.runs[0].devices) device.peak_bytes = 100_MiB;
  for (auto& device : other.accumulations[0].no_sync.runs[0].devices) device.peak_bytes = 90_MiB;
  EXPECT_TRUE(answer_to(other, "more memory").starts_with("Neither saved any in this run."));
  EXPECT_TRUE(mentions(answer_to(results_of(), "combined"),
                       "4 micro-steps in bf16 trained 2.50 ± 0.00 times the rows per second of "
                       "plain fp32 (1.25 with accumulation alone, 2.00 with bf16 alone)"));
}

TEST(Lab7Figures, ShowSpeedMemoryAndLosses) {
  const auto figures = lab7_figures(results_of());
  ASSERT_EQ(figures.size(), 3U);
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
  Lab7Results bare = results_of();
  for (auto& run : bare.fp32.runs) run.memory.reset();
  const auto figures_of_bare = lab7_figures(bare);
  EXPECT_TRUE(std::isnan(std::get<BarChart>(figures_of_bare[1].chart).series[0].values[0]));
}

TEST(Lab7Report, HoldsAllParts) {
  const LabReport report = lab7_report(results_of());
  EXPECT_EQ(report.title, "Practical 7: gradient accumulation and mixed precision");
  EXPECT_EQ(report.stamp.versions.at("libtorch"), "2.11.0");
  EXPECT_EQ(report.tables.size(), 5U);
  EXPECT_EQ(report.figures.size(), 3U);
  EXPECT_EQ(lab7().folder, "reports/lab7");
}

}  // namespace
}  // namespace lockstep::cli
