#include "base/fault.hpp"

#include <gtest/gtest.h>

#include "base/stack.hpp"
#include "launch/progress.hpp"
#include "lockstep/error.hpp"
#include "support.hpp"

namespace lockstep::test::fault_test {
namespace {

TEST(Faults, AreReadAndWritten) {
  const std::string text =
      "kill@rank=1,step=5;stop@rank=0,step=1;exit@rank=2,step=3,code=7;slow@rank=1,step=2,ms=40;"
      "nan@rank=0,step=9;mismatch@rank=3,step=4;netcut@rank=1,step=6";
  const auto faults = parse_faults(text);
  ASSERT_EQ(faults.size(), 7U);
  EXPECT_EQ(faults[0], (Fault{FaultKind::kKill, 1, 5, 0}));
  EXPECT_EQ(faults[2], (Fault{FaultKind::kExit, 2, 3, 7}));
  EXPECT_EQ(faults[3], (Fault{FaultKind::kSlow, 1, 2, 40}));
  EXPECT_EQ(format_faults(faults), text);
  EXPECT_EQ(parse_faults("exit@step=2,rank=1")[0], (Fault{FaultKind::kExit, 1, 2, 1}));
}

TEST(Faults, BadOnesAreRefusedByName) {
  for (const char* text : {"", "kill", "kill@", "kill@rank=1", "kill@step=1", "kil@rank=1,step=1",
                           "kill@rank=1,step=0", "kill@rank=-1,step=1", "kill@rank=1,step=x",
                           "kill@rank=1,step=1,ms=3", "exit@rank=1,step=1,code=256",
                           "kill@rank=1,step=1;", "kill@rank=1 step=1"}) {
    expect_error(Code::kUsage, {"cannot inject", "kill@rank=1,step=5"},
                 [text] { parse_faults(text); });
  }
}

TEST(Faults, AreTakenOnceInTheirStepByTheirRank) {
  const auto faults = parse_faults("nan@rank=1,step=3;mismatch@rank=0,step=3");
  FaultInjector one(faults, 1);
  FaultInjector two(faults, 2);
  for (int step = 1; step <= 4; ++step) {
    one.begin_step(step);
    one.begin_backward();  // counts only where the program does not
    two.begin_step(step);
    EXPECT_EQ(one.take(FaultKind::kNan), step == 3) << step;
    EXPECT_FALSE(one.take(FaultKind::kNan)) << step;
    EXPECT_FALSE(one.take(FaultKind::kMismatch)) << step;
    EXPECT_FALSE(two.take(FaultKind::kNan)) << step;
  }
}

TEST(Faults, BackwardPassesAreStepsWhereTheProgramCountsNone) {
  FaultInjector injector(parse_faults("nan@rank=0,step=2"), 0);
  injector.begin_backward();
  EXPECT_FALSE(injector.take(FaultKind::kNan));
  injector.begin_backward();
  EXPECT_TRUE(injector.take(FaultKind::kNan));
}

// After `seconds`, in which each rank did 20 steps: one of them computed, the others waited.
std::vector<RankStatus> ranks_after(const std::vector<double>& own_seconds, double seconds,
                                    int64_t step) {
  std::vector<RankStatus> ranks;
  for (const double own : own_seconds) {
    RankStatus rank;
    rank.rank = static_cast<int>(ranks.size());
    rank.step = step;
    rank.busy_ns = static_cast<int64_t>(own * 1e9);
    rank.communicating_ns = static_cast<int64_t>((seconds - own) * 1e9);
    ranks.push_back(rank);
  }
  return ranks;
}

TEST(Stragglers, AreNamedWithTheirRatioOnce) {
  StragglerWatch watch;
  EXPECT_FALSE(watch.look(ranks_after({0.5, 1.5, 0.5}, 1.5, 5))) << "too early to tell";
  const auto found = watch.look(ranks_after({1, 3, 1}, 3, 20));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 1);
  EXPECT_NEAR(found->ratio, 3, 1e-9);
  EXPECT_NEAR(found->own_ms, 150, 1e-9);
  EXPECT_EQ(describe(*found),
            "rank 1 is slow: 150 ms of its own per step, 3.0 times the median of the other ranks, "
            "which wait for it");
  EXPECT_FALSE(watch.look(ranks_after({2, 6, 2}, 6, 40))) << "it was named already";
  const auto slower = watch.look(ranks_after({3, 12, 3}, 12, 60));
  ASSERT_TRUE(slower) << "it has become twice as slow";
  EXPECT_NEAR(slower->ratio, 6, 1e-9);
}

TEST(Stragglers, EvenRanksAreNotNamedAndRecoveryIsNoticed) {
  StragglerWatch watch;
  EXPECT_FALSE(watch.look(ranks_after({2, 2.2}, 3, 20)));
  EXPECT_TRUE(watch.look(ranks_after({4, 6.2}, 7, 40)));
  EXPECT_FALSE(watch.look(ranks_after({6, 8.2}, 10, 60))) << "it keeps up again";
  EXPECT_TRUE(watch.look(ranks_after({8, 12.2}, 15, 80))) << "and is slow once more";
  EXPECT_FALSE(StragglerWatch().look(ranks_after({5}, 5, 50))) << "a single rank";
}

TEST(Stacks, AreReadInnermostFirst) {
  const auto functions = functions_in_stack(
      "/lib/libc.so.6(clock_nanosleep+0x23) [0x7f00]\n"
      "./train(_ZN5model7forwardERKSs+0x10) [0x55]\n./bin/train(+0x2345) [0x55]\nend\n");
  ASSERT_EQ(functions.size(), 3U);
  EXPECT_EQ(functions[0], "clock_nanosleep");
  EXPECT_TRUE(functions[1].starts_with("model::forward(")) << functions[1];
  EXPECT_EQ(functions[2], "train+0x2345");
  EXPECT_TRUE(functions_in_stack("").empty());
  EXPECT_TRUE(functions_in_stack("rubbish\n)(\n").empty());
}

}  // namespace
}  // namespace lockstep::test::fault_test
