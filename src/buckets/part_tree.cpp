#include "buckets/part_tree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/counted.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

int64_t middle_of(const PartRange& node) {
  return node.begin + static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(node.size())) / 2);
}

}  // namespace

PartTree::PartTree(int64_t parts, int ranks) : parts_(parts), ranks_(ranks) {
  if (parts >= 1 && parts % ranks == 0) return;
  throw Error(Code::kUsage,
              fmt::format("{} cannot be divided over {}", counted(parts, "virtual shard"),
                          counted(ranks, "rank")),
              "choose a multiple of every number of ranks that you will use, such as 8 for 1, 2, 4 "
              "and 8, or "
              "12 for 1, 2, 3, 4, 6 and 12");
}

PartRange PartTree::parts_of(int rank) const {
  return {rank * parts_per_rank(), (rank + 1) * parts_per_rank()};
}

std::vector<PartRange> PartTree::nodes_of(int rank) const {
  std::vector<PartRange> nodes;
  add_nodes_within(root(), parts_of(rank), nodes);
  return nodes;
}

void PartTree::add_nodes_within(const PartRange& node, const PartRange& own,
                                std::vector<PartRange>& nodes) const {
  if (node.end <= own.begin || own.end <= node.begin) return;
  if (own.begin <= node.begin && node.end <= own.end) return nodes.push_back(node);
  const int64_t middle = middle_of(node);
  add_nodes_within({node.begin, middle}, own, nodes);
  add_nodes_within({middle, node.end}, own, nodes);
}

int64_t PartTree::most_nodes() const {
  size_t most = 0;
  for (int rank = 0; rank < ranks_; ++rank) most = std::max(most, nodes_of(rank).size());
  return static_cast<int64_t>(most);
}

std::optional<PartRange> PartTree::sibling_of(const PartRange& node) const {
  PartRange whole = root();
  while (whole.size() > 1) {
    const PartRange left{whole.begin, middle_of(whole)};
    const PartRange right{left.end, whole.end};
    if (node == left) return right;
    if (node == right) return left;
    whole = node.begin < left.end ? left : right;
  }
  return std::nullopt;
}

double sum_in_tree(const PartTree& tree, const std::vector<double>& numbers) {
  PartFold<double> fold(tree, [](double left, double right) { return left + right; });
  for (size_t part = 0; part < numbers.size(); ++part) {
    const auto begin = static_cast<int64_t>(part);
    fold.put({begin, begin + 1}, numbers[part]);
  }
  return fold.values().begin()->second;
}

}  // namespace lockstep
