#include "buckets/part_tree.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "lockstep/error.hpp"
#include "support.hpp"

namespace lockstep::test::part_tree_test {
namespace {

std::string in_brackets(const PartTree& tree, const std::vector<int>& order) {
  PartFold<std::string> fold(tree, [](const std::string& left, const std::string& right) {
    return "(" + left + right + ")";
  });
  for (const int part : order) fold.put({part, part + 1}, std::to_string(part));
  EXPECT_EQ(fold.values().size(), 1U);
  return fold.values().begin()->second;
}

TEST(PartTree, EveryRangeHasAPowerOfTwoInItsLeftHalf) {
  EXPECT_EQ(in_brackets(PartTree(4, 1), {0, 1, 2, 3}), "((01)(23))");
  EXPECT_EQ(in_brackets(PartTree(6, 1), {0, 1, 2, 3, 4, 5}), "(((01)(23))(45))");
  EXPECT_EQ(in_brackets(PartTree(7, 1), {0, 1, 2, 3, 4, 5, 6}), "(((01)(23))((45)6))");
  EXPECT_EQ(in_brackets(PartTree(1, 1), {0}), "0");
}

TEST(PartTree, TheOrderOfArrivalDoesNotMatter) {
  EXPECT_EQ(in_brackets(PartTree(6, 1), {5, 2, 0, 4, 3, 1}), "(((01)(23))(45))");
}

// What ranks sum alone and then exchange gives the same brackets for every number of ranks.
TEST(PartTree, NumbersOfRanksAgree) {
  for (const int64_t parts : {1, 2, 3, 5, 6, 7, 8, 12, 15, 24, 30, 64}) {
    std::vector<int> order(static_cast<size_t>(parts));
    std::iota(order.begin(), order.end(), 0);
    const std::string alone = in_brackets(PartTree(parts, 1), order);
    for (int ranks = 2; ranks <= parts; ++ranks) {
      if (parts % ranks != 0) continue;
      const PartTree tree(parts, ranks);
      const auto join = [](const std::string& left, const std::string& right) {
        return "(" + left + right + ")";
      };
      PartFold<std::string> all(tree, join);
      for (int rank = 0; rank < ranks; ++rank) {
        PartFold<std::string> own(tree, join);
        const PartRange block = tree.parts_of(rank);
        EXPECT_EQ(block.size(), parts / ranks);
        for (auto part = block.begin; part < block.end; ++part) {
          own.put({part, part + 1}, std::to_string(part));
        }
        const auto nodes = tree.nodes_of(rank);
        EXPECT_LE(static_cast<int64_t>(nodes.size()), tree.most_nodes());
        ASSERT_EQ(own.values().size(), nodes.size()) << parts << " parts, rank " << rank;
        size_t next = 0;
        for (const auto& [node, text] : own.values()) {
          EXPECT_EQ(node, nodes[next++]);
          all.put(node, text);
        }
      }
      EXPECT_EQ(all.values().begin()->second, alone) << parts << " parts on " << ranks << " ranks";
    }
  }
}

TEST(PartTree, APowerOfTwoOfPartsOnEachRankIsOneNode) {
  for (const int ranks : {1, 2, 4, 8}) EXPECT_EQ(PartTree(8, ranks).most_nodes(), 1);
  EXPECT_EQ(PartTree(6, 3).most_nodes(), 1);
  EXPECT_EQ(PartTree(6, 2).most_nodes(), 2);
}

TEST(PartTree, RefusesPartsThatRanksDoNotDivide) {
  expect_error(Code::kUsage, {"8 virtual shards cannot be divided over 3"}, [] { PartTree(8, 3); });
  expect_error(Code::kUsage, {"0 virtual shards"}, [] { PartTree(0, 1); });
}

TEST(PartTree, NumbersAreAddedInItsOrder) {
  // In another order the small ones would be lost.
  const std::vector<double> numbers = {1e16, -1e16, 1, 1};
  EXPECT_EQ(sum_in_tree(PartTree(4, 1), numbers), 2);
}

}  // namespace
}  // namespace lockstep::test::part_tree_test
