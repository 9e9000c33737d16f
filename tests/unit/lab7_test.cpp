#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "cli/lab/lab7.hpp"
#include "cli/lab/lab7_plan.hpp"
#include "cli/lab/lab_command.hpp"
#include "cli/lab/lab_measures.hpp"
#include "cli/lab/lab_text.hpp"
#include "lab7_support.hpp"
#include "support.hpp"

namespace lockstep::cli {
namespace {

using test::cores;
using test::expect_error;
using test::experiment_named;
using test::made_lab7;
using test::made_set;
using test::names_of;
using test::value_of;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

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
  const Lab7Results results = made_lab7();
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

}  // namespace
}  // namespace lockstep::cli
