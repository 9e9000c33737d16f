#include <gtest/gtest.h>

#include <limits>

#include "cli/lab/lab_plan.hpp"
#include "cli/lab/lab_text.hpp"
#include "lab_support.hpp"
#include "support.hpp"

namespace lockstep::cli::lab_test {
namespace {

using test::cores;
using test::expect_error;
using test::made_set;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

auto run(const LabRequest& request) {
  return [request] { run_lab_command(request, "lockstep lab"); };
}

TEST(LabCommand, RefusesWhatALabDoesNotHave) {
  expect_error(Code::kUsage, {"there is no lab \"8\"", "5, 6, 7, 10 and homework2"},
               run({"8", {}}));
  expect_error(Code::kUsage, {"lab 5 has no --ranks", "belongs to lab 6"},
               run({"5", {.own = {{"--ranks", "2"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --bucket-mib"},
               run({"5", {.own = {{"--bucket-mib", "1"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --split-rows"},
               run({"6", {.own = {{"--split-rows", "9"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --split-devices", "belongs to lab 5"},
               run({"6", {.own = {{"--split-devices", "2"}}}}));
}

TEST(LabCommand, LabsOfIssueFiveHaveTheirFlags) {
  expect_error(Code::kUsage, {"there is no lab \"8\"", "5, 6, 7, 10 and homework2", "lab all"},
               run({"8", {}}));
  expect_error(Code::kUsage, {"lab 7 has no --ranks", "belongs to lab 6"},
               run({"7", {.own = {{"--ranks", "2"}}}}));
  expect_error(Code::kUsage, {"lab homework2 has no --split-rows", "belongs to lab 5"},
               run({"homework2", {.own = {{"--split-rows", "9"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --amp", "belongs to lab 7 and lab homework2"},
               run({"5", {.own = {{"--amp", "bf16"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --accum-steps"},
               run({"6", {.own = {{"--accum-steps", "4"}}}}));
}

TEST(LabCommand, FlagsOfPractical10BelongToIt) {
  expect_error(Code::kUsage, {"lab 7 has no --micro-batches", "belongs to lab 10"},
               run({"7", {.own = {{"--micro-batches", "2"}}}}));
  expect_error(Code::kUsage, {"lab 5 has no --batches"}, run({"5", {.own = {{"--batches", "2"}}}}));
  expect_error(Code::kUsage, {"lab 6 has no --stages"}, run({"6", {.own = {{"--stages", "2"}}}}));
  expect_error(Code::kUsage, {"lab 10 has no --amp"}, run({"10", {.own = {{"--amp", "bf16"}}}}));
}

TEST(Lab5Plan, PointsReachTheFullCountInAtMostFour) {
  EXPECT_EQ(scaling_points(1), (std::vector<int>{1}));
  EXPECT_EQ(scaling_points(2), (std::vector<int>{1, 2}));
  EXPECT_EQ(scaling_points(4), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(scaling_points(5), (std::vector<int>{1, 2, 5}));
  EXPECT_EQ(scaling_points(8), (std::vector<int>{1, 2, 4, 8}));
}

TEST(Lab5Plan, SpecOfTheFirstDevices) {
  EXPECT_EQ(spec_of_first(plan_devices("cpu:3", cores(4)), 2), "cpu:2");
  EXPECT_EQ(spec_of_first(plan_devices("cuda:0*4", cores(4, 1)), 3), "cuda:0*3");
  const auto mixed = plan_devices("cuda:1*2,0", cores(4, 2));
  EXPECT_EQ(spec_of_first(mixed, 1), "cuda:1");
  EXPECT_EQ(spec_of_first(mixed, 3), "cuda:1*2,0");
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

TEST(Lab5Tables, StepTimesHaveOneUnit) {
  EXPECT_EQ(format_step_ms(41.23, 0.84), "41.2 ± 0.8 ms");
  EXPECT_EQ(format_step_ms(0.2134, 0.004), "213 ± 4 µs");
  EXPECT_EQ(format_step_ms(1234, 50), "1.23 ± 0.05 s");
}

TEST(LabText, ReadsAsAPersonWouldWriteIt) {
  EXPECT_EQ(percent_range(0.853, 0.848), "85 %") << "not \"85 to 85 %\"";
  EXPECT_EQ(percent_range(0.853, 0.914), "85 to 91 %");
  EXPECT_EQ(plural(1, "warm-up step"), "1 warm-up step");
  EXPECT_EQ(plural(2, "process", "processes"), "2 processes");
  EXPECT_EQ(rows_text({64}), "64 rows");
  EXPECT_EQ(rows_text({1}), "1 row");
  EXPECT_EQ(rows_text({32, 32}), "32 rows each");
  EXPECT_EQ(rows_text({22, 22, 20}), "22, 22 and 20 rows");
  EXPECT_EQ(against_text(0), "as much as");
  EXPECT_EQ(against_text(-1024), "1.00 KiB less than");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_step_s({.mean = 41.23, .stddev = 0.84}), "0.0412 ± 0.0008");
  EXPECT_EQ(format_range_s({.min = 73.7, .max = 173.9}), "0.074 … 0.174");
  EXPECT_EQ(format_s(12.34), "12.3");
}

TEST(LabText, LossesThatDifferByRoundingHaveNoExponent) {
  const RunRecord one = test::made_run({});
  RunRecord other = one;
  EXPECT_EQ(loss_parity(one, other, "fp32's"), " All 4 losses equal fp32's exactly.");
  other.losses[1] *= 1 + 1e-7;
  EXPECT_EQ(loss_parity(one, other, "fp32's"),
            " Over 4 steps the losses differ from fp32's by less than 0.001 %, which is rounding.");
  other.losses[1] = 0.55;
  EXPECT_EQ(loss_parity(one, other, "fp32's"),
            " Over 4 steps the losses differ from fp32's by at most 10 %.");
}

TEST(LabText, TimesAreJudgedUnlessSomethingSpeaksAgainstIt) {
  EXPECT_EQ(times_warning({}, {Comparison{}}), "");
  EXPECT_TRUE(test::mentions(times_warning({.busy_cores = 0.3}, {}), "kept 0.3 cores busy"));
  EXPECT_EQ(times_warning({.busy_cores = 3, .queued = 0.01}, {}), "")
      << "the runs had their cores all the same";
  EXPECT_TRUE(test::mentions(times_warning({.queued = 0.3}, {}), "had no core for up to 30 %"));
  Comparison unsafe;
  unsafe.unsafe = true;
  unsafe.noise = 0.4;
  EXPECT_TRUE(test::mentions(times_warning({}, {Comparison{}, unsafe}), "varied by 40 %"));
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
}  // namespace lockstep::cli::lab_test
