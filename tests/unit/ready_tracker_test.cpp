#include "buckets/ready_tracker.hpp"

#include <gtest/gtest.h>

namespace lockstep::test::ready_tracker_test {
namespace {

using Arrival = ReadyTracker::Arrival;
using Parameters = std::vector<size_t>;

TEST(ReadyTracker, EachParameterAwaitsOneGradient) {
  ReadyTracker tracker(3, /*static_graph=*/false);
  EXPECT_EQ(tracker.begin_backward(), Parameters{});
  EXPECT_EQ(tracker.arrive(2), Arrival::kLast);
  EXPECT_EQ(tracker.arrive(0), Arrival::kLast);
  EXPECT_EQ(tracker.awaited(), Parameters{1});
  EXPECT_EQ(tracker.arrive(2), Arrival::kLate);
  EXPECT_EQ(tracker.arrive(1), Arrival::kLast);
  EXPECT_EQ(tracker.awaited(), Parameters{});
}

TEST(ReadyTracker, TheNextBackwardAwaitsAllAnew) {
  ReadyTracker tracker(2, false);
  tracker.begin_backward();
  tracker.arrive(0);
  tracker.arrive(1);
  tracker.end_backward();
  tracker.begin_backward();
  EXPECT_EQ(tracker.awaited(), (Parameters{0, 1}));
  EXPECT_EQ(tracker.arrive(0), Arrival::kLast);
}

TEST(ReadyTracker, AParameterWithoutGradientIsAwaitedNoMore) {
  ReadyTracker tracker(2, false);
  tracker.begin_backward();
  tracker.expect_none(1);
  EXPECT_EQ(tracker.awaited(), Parameters{0});
  EXPECT_EQ(tracker.arrive(1), Arrival::kLate);
}

TEST(ReadyTracker, WhatNoForwardReachesIsKnownAtTheBegin) {
  ReadyTracker tracker(4, false);
  tracker.add_reachable({true, false, false, false});
  tracker.add_reachable({false, false, true, false});
  EXPECT_EQ(tracker.begin_backward(), (Parameters{1, 3}));
}

TEST(ReadyTracker, ReachabilityIsThatOfOneBackward) {
  ReadyTracker tracker(2, false);
  tracker.add_reachable({true, false});
  tracker.begin_backward();
  tracker.end_backward();
  EXPECT_EQ(tracker.begin_backward(), Parameters{}) << "nothing was said since";
  tracker.end_backward();
  tracker.add_reachable({false, true});
  EXPECT_EQ(tracker.begin_backward(), Parameters{0});
}

TEST(ReadyTracker, OnlyAStaticGraphLearns) {
  EXPECT_FALSE(ReadyTracker(2, false).learns());
  EXPECT_TRUE(ReadyTracker(2, true).learns());
}

// Parameter 1 is used twice, parameter 3 never.
TEST(ReadyTracker, AStaticGraphLearnsTheOrderOfLastGradients) {
  ReadyTracker tracker(4, /*static_graph=*/true);
  EXPECT_EQ(tracker.begin_backward(), Parameters{});
  for (const size_t parameter : {2, 1, 0, 1}) {
    EXPECT_EQ(tracker.arrive(parameter), Arrival::kOther);
  }
  EXPECT_EQ(tracker.awaited(), (Parameters{0, 1, 2, 3})) << "nobody knows how many more come";
  EXPECT_EQ(tracker.learn(), (Parameters{2, 0, 1}));
  EXPECT_EQ(tracker.awaited(), Parameters{3});
  EXPECT_FALSE(tracker.learns());
}

TEST(ReadyTracker, AStaticGraphAwaitsWhatItsFirstBackwardGave) {
  ReadyTracker tracker(3, true);
  tracker.begin_backward();
  for (const size_t parameter : {1, 0, 1}) tracker.arrive(parameter);
  tracker.learn();
  tracker.end_backward();
  EXPECT_EQ(tracker.begin_backward(), Parameters{2});
  EXPECT_EQ(tracker.arrive(1), Arrival::kOther);
  EXPECT_EQ(tracker.awaited(), (Parameters{0, 1}));
  EXPECT_EQ(tracker.arrive(1), Arrival::kLast);
  EXPECT_EQ(tracker.arrive(1), Arrival::kLate);
  EXPECT_EQ(tracker.arrive(2), Arrival::kLate);
}

// A backward that failed before it was learned from leaves nothing behind.
TEST(ReadyTracker, LearningBeginsAnewWithTheBackward) {
  ReadyTracker tracker(2, true);
  tracker.begin_backward();
  tracker.arrive(1);
  tracker.arrive(1);
  tracker.begin_backward();
  tracker.arrive(0);
  EXPECT_EQ(tracker.learn(), Parameters{0});
  EXPECT_EQ(tracker.begin_backward(), Parameters{1});
}

// A window of two micro-steps, of which the second is synchronised.
TEST(ReadyTracker, UseAddsUpOverAWindow) {
  ReadyTracker tracker(3, false);
  tracker.mark_used(2);
  tracker.end_backward();
  tracker.begin_backward();
  tracker.arrive(0);
  tracker.mark_zero_filled(1);
  tracker.end_backward();
  EXPECT_EQ(tracker.used(), (std::vector<bool>{true, false, true}));
  EXPECT_TRUE(tracker.zero_filled(1));
  EXPECT_FALSE(tracker.zero_filled(0));
  tracker.end_window();
  EXPECT_EQ(tracker.used(), (std::vector<bool>{false, false, false}));
  EXPECT_FALSE(tracker.zero_filled(1));
}

}  // namespace
}  // namespace lockstep::test::ready_tracker_test
