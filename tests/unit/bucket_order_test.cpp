#include "buckets/bucket_order.hpp"

#include <gtest/gtest.h>

namespace lockstep::test::bucket_order_test {
namespace {

using Order = std::vector<size_t>;

TEST(BucketOrder, ExpectsTheLastLayerFirst) {
  EXPECT_EQ(BucketOrder(3, /*learns=*/true).expected(), (Order{2, 1, 0}));
}

TEST(BucketOrder, ABucketIsLaunchedOnceAllItsGradientsAreThere) {
  BucketOrder order(3, true);
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

TEST(BucketOrder, ABucketThatIsReadyWaitsForThoseBeforeIt) {
  BucketOrder order(3, true);
  order.begin_backward({1, 1, 1});
  order.mark_ready(0, 2);
  order.mark_ready(1, 1);
  EXPECT_EQ(order.take_ready(), std::nullopt);
  order.mark_ready(2, 0);
  EXPECT_EQ(order.take_ready(), 0U);
  EXPECT_EQ(order.take_ready(), 1U);
  EXPECT_EQ(order.take_ready(), 2U);
}

TEST(BucketOrder, EachBackwardBeginsWithTheFirstBucket) {
  BucketOrder order(2, true);
  for (int backward = 0; backward < 2; ++backward) {
    order.begin_backward({1, 1});
    EXPECT_EQ(order.take_ready(), std::nullopt);
    order.mark_ready(1, 0);
    EXPECT_EQ(order.take_ready(), 0U);
    order.end_backward();  // although a bucket is left
  }
}

TEST(BucketOrder, ProposesOnceWhatTheFirstBackwardShowed) {
  BucketOrder order(3, true);
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

TEST(BucketOrder, ARankThatSawNothingProposesWhatItExpects) {
  BucketOrder order(3, true);
  order.end_backward();  // the others'
  EXPECT_EQ(order.take_proposal(), (Order{2, 1, 0}));
}

TEST(BucketOrder, SaysWhetherWhatWasAgreedOnIsNew) {
  BucketOrder order(3, true);
  EXPECT_FALSE(order.agree({2, 1, 0}));
  EXPECT_TRUE(order.agree({1, 2, 0}));
  EXPECT_EQ(order.expected(), (Order{1, 2, 0}));
}

TEST(BucketOrder, ProposesNothingWhereItDoesNotLearn) {
  BucketOrder order(1, /*learns=*/false);
  EXPECT_FALSE(order.changes());
  order.begin_backward({1});
  order.mark_ready(0, 0);
  EXPECT_EQ(order.take_ready(), 0U);
  order.end_backward();
  EXPECT_EQ(order.take_proposal(), std::nullopt);
}

}  // namespace
}  // namespace lockstep::test::bucket_order_test
