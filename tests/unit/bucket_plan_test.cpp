#include "buckets/bucket_plan.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace lockstep::test::bucket_plan_test {
namespace {

std::vector<ParameterSize> floats(std::initializer_list<int64_t> counts) {
  std::vector<ParameterSize> sizes;
  for (const int64_t count : counts) sizes.push_back({count, Dtype::kF32, -1});
  return sizes;
}

std::vector<size_t> in_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

std::vector<std::vector<size_t>> members(const std::vector<PlannedBucket>& plan) {
  std::vector<std::vector<size_t>> all;
  for (const auto& bucket : plan) {
    all.emplace_back();
    for (const auto& gradient : bucket.gradients) all.back().push_back(gradient.parameter);
  }
  return all;
}

using Members = std::vector<std::vector<size_t>>;

TEST(BucketPlan, ABucketClosesOnceItsLimitIsReached) {
  const auto sizes = floats({16, 16, 16, 16, 16});
  const auto plan = plan_buckets(sizes, in_order(5), {.first_bytes = 64, .cap_bytes = 128});
  EXPECT_EQ(members(plan), (Members{{0}, {1, 2}, {3, 4}}));
}

TEST(BucketPlan, ALargeParameterOvershoots) {
  const auto sizes = floats({1, 1000, 1, 1});
  const auto plan = plan_buckets(sizes, in_order(4), {.first_bytes = 8, .cap_bytes = 64});
  EXPECT_EQ(members(plan), (Members{{0, 1}, {2, 3}}));
  EXPECT_EQ(plan[0].count, 16 + 1008);
}

// A model whose rebuilt buckets PyTorch 1.13.1 reported as 16867368, 4202496 and 2101248 bytes for
// a cap of 4 MiB.
TEST(BucketPlan, AgreesWithPyTorchsRebuiltBuckets) {
  const auto sizes = floats({10, 2048 * 10, 2048, 2048 * 2048, 2048, 512 * 2048, 1024, 512 * 1024});
  const auto plan =
      plan_buckets(sizes, in_order(8), {.first_bytes = 1 << 20, .cap_bytes = 4 << 20});
  EXPECT_EQ(members(plan), (Members{{0, 1, 2, 3}, {4, 5}, {6, 7}}));
  const std::vector<int64_t> expected = {16'867'368, 4'202'496, 2'101'248};
  for (size_t i = 0; i < 3; ++i) {
    int64_t bytes = 0;
    for (const auto& gradient : plan[i].gradients) bytes += sizes[gradient.parameter].count * 4;
    EXPECT_EQ(bytes, expected[i]);
  }
}

TEST(BucketPlan, DtypesAndDevicesAreKeptApartWithAFirstBucketEach) {
  const std::vector<ParameterSize> sizes = {{16, Dtype::kF32, 0},  {32, Dtype::kBF16, 0},
                                            {16, Dtype::kF32, 0},  {16, Dtype::kF32, 1},
                                            {32, Dtype::kBF16, 0}, {16, Dtype::kF32, 0}};
  const auto plan = plan_buckets(sizes, in_order(6), {.first_bytes = 64, .cap_bytes = 1024});
  EXPECT_EQ(members(plan), (Members{{0}, {1}, {3}, {4}, {2, 5}}));
  EXPECT_EQ(plan[1].dtype, Dtype::kBF16);
  EXPECT_EQ(plan[2].device, 1);
}

TEST(BucketPlan, EachGradientIsAlignedAndNoneOverlap) {
  const auto sizes = floats({1, 17, 3, 64, 0, 5});
  const auto plan = plan_buckets(sizes, in_order(6), {.first_bytes = 4096, .cap_bytes = 4096});
  ASSERT_EQ(plan.size(), 1);
  int64_t end = 0;
  for (const auto& gradient : plan[0].gradients) {
    EXPECT_EQ(gradient.offset * 4 % kGradientAlignment, 0);
    EXPECT_GE(gradient.offset, end);
    end = gradient.offset + sizes[gradient.parameter].count;
  }
  EXPECT_LE(end, plan[0].count);
}

TEST(BucketPlan, EveryOrderNeedsTheSameMemory) {
  const auto sizes = floats({1, 700, 33, 64, 5, 129});
  const BucketLimits limits{.first_bytes = 256, .cap_bytes = 1024};
  const auto bytes_of = [&](const std::vector<size_t>& order) {
    int64_t bytes = 0;
    for (const auto& bucket : plan_buckets(sizes, order, limits)) bytes += bucket.bytes();
    return bytes;
  };
  EXPECT_EQ(bytes_of({0, 1, 2, 3, 4, 5}), bytes_of({5, 3, 1, 0, 2, 4}));
}

TEST(BucketPlan, TheOrderGivenIsTheOrderOfLaunch) {
  const auto sizes = floats({16, 16, 16});
  const std::vector<size_t> order = {2, 0, 1};
  const auto plan = plan_buckets(sizes, order, {.first_bytes = 1, .cap_bytes = 1});
  EXPECT_EQ(members(plan), (Members{{2}, {0}, {1}}));
}

}  // namespace
}  // namespace lockstep::test::bucket_plan_test
