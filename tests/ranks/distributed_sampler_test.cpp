// DistributedSampler against closed forms. tests/parity/sampler_parity.py compares the same class
// with torch.utils.data.DistributedSampler.

#include "lockstep/distributed_sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "support.hpp"

namespace lockstep::test::distributed_sampler_test {
namespace {

using Indices = std::vector<int64_t>;

Indices in_order(int64_t rows, int rank, int ranks, bool drop_last = false) {
  return DistributedSampler(rows, ranks, rank, {.shuffle = false, .drop_last = drop_last})
      .indices();
}

Indices shuffled(int64_t rows, int rank, int ranks, int64_t seed, int64_t epoch) {
  DistributedSampler sampler(rows, ranks, rank, {.seed = seed});
  sampler.set_epoch(epoch);
  return sampler.indices();
}

TEST(DistributedSampler, TakesEveryRthRowFromItsOwnPlace) {
  EXPECT_EQ(in_order(6, 0, 3), (Indices{0, 3}));
  EXPECT_EQ(in_order(6, 1, 3), (Indices{1, 4}));
  EXPECT_EQ(in_order(6, 2, 3), (Indices{2, 5}));
}

TEST(DistributedSampler, PadsFromTheFront) {
  EXPECT_EQ(in_order(7, 0, 3), (Indices{0, 3, 6}));
  EXPECT_EQ(in_order(7, 1, 3), (Indices{1, 4, 0}));
  EXPECT_EQ(in_order(7, 2, 3), (Indices{2, 5, 1}));
}

TEST(DistributedSampler, PadsInRoundsWhereThereAreFewerRowsThanRanks) {
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(in_order(2, rank, 5), (Indices{rank % 2})) << "rank " << rank;
  }
}

TEST(DistributedSampler, DropsTheLastRowsWhereAskedTo) {
  EXPECT_EQ(in_order(7, 0, 3, true), (Indices{0, 3}));
  EXPECT_EQ(in_order(7, 2, 3, true), (Indices{2, 5}));
  EXPECT_EQ(in_order(6, 2, 3, true), (Indices{2, 5})) << "nothing to drop";
  EXPECT_EQ(in_order(2, 1, 5, true), Indices{}) << "fewer rows than ranks";
}

TEST(DistributedSampler, EveryRankHasAsManyRows) {
  for (const int64_t rows : {0, 1, 5, 64, 101}) {
    for (const int ranks : {1, 2, 3, 5}) {
      for (int rank = 0; rank < ranks; ++rank) {
        for (const bool drop_last : {false, true}) {
          const DistributedSampler sampler(rows, ranks, rank, {.drop_last = drop_last});
          EXPECT_EQ(static_cast<int64_t>(sampler.indices().size()), sampler.size());
          EXPECT_EQ(sampler.size(), drop_last ? rows / ranks : (rows + ranks - 1) / ranks);
        }
      }
    }
  }
}

TEST(DistributedSampler, RanksTogetherTakeThePermutationOfSeedPlusEpoch) {
  const int64_t rows = 101;
  const int ranks = 3;
  const auto order = torch::randperm(rows, at::detail::createCPUGenerator(7 + 4), torch::kInt64);
  for (int rank = 0; rank < ranks; ++rank) {
    const Indices mine = shuffled(rows, rank, ranks, 7, 4);
    for (size_t i = 0; i < mine.size(); ++i) {
      const int64_t place = (static_cast<int64_t>(i) * ranks + rank) % rows;
      EXPECT_EQ(mine[i], order[place].item<int64_t>()) << "rank " << rank << ", row " << i;
    }
  }
}

TEST(DistributedSampler, EveryRowIsTakenAndOnlyThePaddingTwice) {
  std::map<int64_t, int> taken;
  for (int rank = 0; rank < 3; ++rank) {
    for (const int64_t row : shuffled(100, rank, 3, 0, 0)) ++taken[row];
  }
  EXPECT_EQ(taken.size(), 100U);
  const auto twice =
      std::count_if(taken.begin(), taken.end(), [](const auto& row) { return row.second == 2; });
  EXPECT_EQ(twice, 2) << "34 rows for each of 3 ranks are 102";
}

TEST(DistributedSampler, TheOrderChangesWithTheEpochOnly) {
  EXPECT_EQ(shuffled(50, 1, 2, 0, 3), shuffled(50, 1, 2, 0, 3));
  EXPECT_NE(shuffled(50, 1, 2, 0, 3), shuffled(50, 1, 2, 0, 4));
  EXPECT_EQ(shuffled(50, 1, 2, 3, 1), shuffled(50, 1, 2, 1, 3)) << "the sum of seed and epoch";
  torch::manual_seed(5);
  const double before = torch::rand({1}).item<double>();
  torch::manual_seed(5);
  shuffled(50, 1, 2, 0, 0);
  EXPECT_EQ(torch::rand({1}).item<double>(), before) << "draws none of the program's numbers";
}

TEST(DistributedSampler, RefusesRanksThatDoNotExist) {
  const auto with = [](int64_t rows, int rank, int ranks) {
    return [=] { DistributedSampler(rows, ranks, rank); };
  };
  test::expect_error(Code::kSplit, {"rank 2 of 2"}, with(4, 2, 2));
  test::expect_error(Code::kSplit, {"rank -1 of 2"}, with(4, -1, 2));
  test::expect_error(Code::kSplit, {"rank 0 of 0"}, with(4, 0, 0));
  test::expect_error(Code::kSplit, {"-4 rows"}, with(-4, 0, 1));
}

}  // namespace
}  // namespace lockstep::test::distributed_sampler_test
