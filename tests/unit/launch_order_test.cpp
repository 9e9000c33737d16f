#include "buckets/bucket_order.hpp"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Order = std::vector<size_t>;

TEST(LaunchOrder, ExpectsTheLastLayerFirst) {
  EXPECT_EQ(LaunchOrder(3, /*learns=*/true).expected(), (Order{2, 1, 0}));
}

TEST(LaunchOrder, ABucketIsLaunchedOnceAllItsGradientsAreThere) {
  LaunchOrder order(3, true);
  order.begin_backward({2, 1});
  EXPECT_EQ(order.take_ready(), std::nullopt);
  order.mark_ready(2, 0);
  EXPECT_EQ(order.take_ready(), std::nullopt);
  order.mark_ready(1, 0);
  EXPECT_EQ(order.take_ready(), 0U);
  EXPECT_EQ(order.take_ready(), std::nullopt);
  order.mark_ready(0, 1);
  EXPECT_EQ(order.take_ready(), 1U);
  EXPECT_EQ(order.take_ready(), std::nullopt) << "all were launched";
}

TEST(LaunchOrder, ABucketThatIsReadyWaitsForThoseBeforeIt) {
  LaunchOrder order(3, true);
  order.begin_backward({1, 1, 1});
  order.mark_ready(0, 2);
  order.mark_ready(1, 1);
  EXPECT_EQ(order.take_ready(), std::nullopt);
  order.mark_ready(2, 0);
  EXPECT_EQ(order.take_ready(), 0U);
  EXPECT_EQ(order.take_ready(), 1U);
  EXPECT_EQ(order.take_ready(), 2U);
}

TEST(LaunchOrder, EachBackwardBeginsWithTheFirstBucket) {
  LaunchOrder order(2, true);
  for (int backward = 0; backward < 2; ++backward) {
    order.begin_backward({1, 1});
    EXPECT_EQ(order.take_ready(), std::nullopt);
    order.mark_ready(1, 0);
    EXPECT_EQ(order.take_ready(), 0U);
    order.end_backward();  // although a bucket is left
  }
}

TEST(LaunchOrder, ProposesOnceWhatTheFirstBackwardShowed) {
  LaunchOrder order(3, true);
  EXPECT_EQ(order.take_proposal(), std::nullopt) << "nothing was seen";
  order.begin_backward({3});
  for (const size_t parameter : {1, 2, 0}) order.mark_ready(parameter, 0);
  EXPECT_EQ(order.take_proposal(), std::nullopt) << "it has not ended";
  order.end_backward();
  order.begin_backward({3});
  for (const size_t parameter : {0, 1, 2}) order.mark_ready(parameter, 0);
  order.end_backward();
  EXPECT_TRUE(order.changes());
  EXPECT_EQ(order.take_proposal(), (Order{1, 2, 0}));
  EXPECT_FALSE(order.changes());
  EXPECT_EQ(order.take_proposal(), std::nullopt);
}

TEST(LaunchOrder, ARankThatSawNothingProposesWhatItExpects) {
  LaunchOrder order(3, true);
  order.end_backward();  // the others'
  EXPECT_EQ(order.take_proposal(), (Order{2, 1, 0}));
}

TEST(LaunchOrder, SaysWhetherWhatWasAgreedOnIsNew) {
  LaunchOrder order(3, true);
  EXPECT_FALSE(order.agree({2, 1, 0}));
  EXPECT_TRUE(order.agree({1, 2, 0}));
  EXPECT_EQ(order.expected(), (Order{1, 2, 0}));
}

TEST(LaunchOrder, ProposesNothingWhereItDoesNotLearn) {
  LaunchOrder order(1, /*learns=*/false);
  EXPECT_FALSE(order.changes());
  order.begin_backward({1});
  order.mark_ready(0, 0);
  EXPECT_EQ(order.take_ready(), 0U);
  order.end_backward();
  EXPECT_EQ(order.take_proposal(), std::nullopt);
}

}  // namespace
}  // namespace lockstep
