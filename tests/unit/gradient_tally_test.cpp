#include "buckets/ready_tracker.hpp"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Arrival = GradientTally::Arrival;
using Parameters = std::vector<size_t>;

TEST(GradientTally, EachParameterAwaitsOneGradient) {
  GradientTally tally(3, /*static_graph=*/false);
  EXPECT_EQ(tally.begin_backward(), Parameters{});
  EXPECT_EQ(tally.arrive(2), Arrival::kLast);
  EXPECT_EQ(tally.arrive(0), Arrival::kLast);
  EXPECT_EQ(tally.awaited(), Parameters{1});
  EXPECT_EQ(tally.arrive(2), Arrival::kLate);
  EXPECT_EQ(tally.arrive(1), Arrival::kLast);
  EXPECT_EQ(tally.awaited(), Parameters{});
}

TEST(GradientTally, TheNextBackwardAwaitsAllAnew) {
  GradientTally tally(2, false);
  tally.begin_backward();
  tally.arrive(0);
  tally.arrive(1);
  tally.end_backward();
  tally.begin_backward();
  EXPECT_EQ(tally.awaited(), (Parameters{0, 1}));
  EXPECT_EQ(tally.arrive(0), Arrival::kLast);
}

TEST(GradientTally, AParameterWithoutGradientIsAwaitedNoMore) {
  GradientTally tally(2, false);
  tally.begin_backward();
  tally.expect_none(1);
  EXPECT_EQ(tally.awaited(), Parameters{0});
  EXPECT_EQ(tally.arrive(1), Arrival::kLate);
}

TEST(GradientTally, WhatNoForwardReachesIsKnownAtTheBegin) {
  GradientTally tally(4, false);
  tally.add_reachable({true, false, false, false});
  tally.add_reachable({false, false, true, false});
  EXPECT_EQ(tally.begin_backward(), (Parameters{1, 3}));
}

TEST(GradientTally, ReachabilityIsThatOfOneBackward) {
  GradientTally tally(2, false);
  tally.add_reachable({true, false});
  tally.begin_backward();
  tally.end_backward();
  EXPECT_EQ(tally.begin_backward(), Parameters{}) << "nothing was said since";
  tally.end_backward();
  tally.add_reachable({false, true});
  EXPECT_EQ(tally.begin_backward(), Parameters{0});
}

TEST(GradientTally, OnlyAStaticGraphLearns) {
  EXPECT_FALSE(GradientTally(2, false).learns());
  EXPECT_TRUE(GradientTally(2, true).learns());
}

// Parameter 1 is used twice, parameter 3 never.
TEST(GradientTally, AStaticGraphLearnsTheOrderOfLastGradients) {
  GradientTally tally(4, /*static_graph=*/true);
  EXPECT_EQ(tally.begin_backward(), Parameters{});
  for (const size_t parameter : {2, 1, 0, 1}) {
    EXPECT_EQ(tally.arrive(parameter), Arrival::kOther);
  }
  EXPECT_EQ(tally.awaited(), (Parameters{0, 1, 2, 3})) << "nobody knows how many more come";
  EXPECT_EQ(tally.learn(), (Parameters{2, 0, 1}));
  EXPECT_EQ(tally.awaited(), Parameters{3});
  EXPECT_FALSE(tally.learns());
}

TEST(GradientTally, AStaticGraphAwaitsWhatItsFirstBackwardGave) {
  GradientTally tally(3, true);
  tally.begin_backward();
  for (const size_t parameter : {1, 0, 1}) tally.arrive(parameter);
  tally.learn();
  tally.end_backward();
  EXPECT_EQ(tally.begin_backward(), Parameters{2});
  EXPECT_EQ(tally.arrive(1), Arrival::kOther);
  EXPECT_EQ(tally.awaited(), (Parameters{0, 1}));
  EXPECT_EQ(tally.arrive(1), Arrival::kLast);
  EXPECT_EQ(tally.arrive(1), Arrival::kLate);
  EXPECT_EQ(tally.arrive(2), Arrival::kLate);
}

// A backward that failed before it was learned from leaves nothing behind.
TEST(GradientTally, LearningBeginsAnewWithTheBackward) {
  GradientTally tally(2, true);
  tally.begin_backward();
  tally.arrive(1);
  tally.arrive(1);
  tally.begin_backward();
  tally.arrive(0);
  EXPECT_EQ(tally.learn(), Parameters{0});
  EXPECT_EQ(tally.begin_backward(), Parameters{1});
}

// A window of two micro-steps, of which the second is synchronised.
TEST(GradientTally, UseAddsUpOverAWindow) {
  GradientTally tally(3, false);
  tally.mark_used(2);
  tally.end_backward();
  tally.begin_backward();
  tally.arrive(0);
  tally.mark_zero_filled(1);
  tally.end_backward();
  EXPECT_EQ(tally.used(), (std::vector<bool>{true, false, true}));
  EXPECT_TRUE(tally.zero_filled(1));
  EXPECT_FALSE(tally.zero_filled(0));
  tally.end_window();
  EXPECT_EQ(tally.used(), (std::vector<bool>{false, false, false}));
  EXPECT_FALSE(tally.zero_filled(1));
}

}  // namespace
}  // namespace lockstep
