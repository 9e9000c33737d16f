#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

/// Parts [begin, end) of a global batch.
struct PartRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  auto operator<=>(const PartRange&) const = default;
};

/// The order in which the sums of V parts are added: a binary tree that depends on V alone.
///
/// Note [One tree for all ranks]: floating-point sums depend on their order. So a range of more
/// than one part is always the sum of the same two halves, left + right, of which the left one has
/// the largest power of two that is smaller than the range. Rank r of R computes parts [rV/R,
/// (r+1)V/R). Where V/R is a power of two, these are one node of the tree, or a few that lie side
/// by side; in general a rank sums those nodes that lie within its own parts, and the nodes above
/// them are added when ranks have exchanged theirs. The bits do not depend on which
/// rank adds two nodes.
class PartTree {
 public:
  /// Refuses (kUsage) a number of parts that the ranks do not divide.
  PartTree(int64_t parts, int ranks);

  int64_t parts() const { return parts_; }
  int64_t parts_per_rank() const { return parts_ / ranks_; }
  int ranks() const { return ranks_; }
  PartRange root() const { return {0, parts_}; }
  PartRange parts_of(int rank) const;

  /// The largest nodes within this rank's parts, from left to right.
  std::vector<PartRange> nodes_of(int rank) const;

  /// The most nodes that any rank has.
  int64_t most_nodes() const;

  /// The other half of the node that this one is a half of; none for the root.
  std::optional<PartRange> sibling_of(const PartRange& node) const;

 private:
  void add_nodes_within(const PartRange& node, const PartRange& own,
                        std::vector<PartRange>& nodes) const;

  int64_t parts_;
  int ranks_;
};

/// Adds up the nodes of a tree in any order of arrival; `add(left, right)` returns their sum.
template <class Value>
class PartFold {
 public:
  using Add = std::function<Value(Value left, Value right)>;

  PartFold(const PartTree& tree, Add add) : tree_(tree), add_(std::move(add)) {}

  void clear() { values_.clear(); }

  /// Takes over a node's value, and adds it to its other half as soon as that is there.
  void put(PartRange node, Value value) {
    while (auto sibling = take_sibling(node)) {
      const bool is_left = sibling->first < node;
      value = is_left ? add_(std::move(sibling->second), std::move(value))
                      : add_(std::move(value), std::move(sibling->second));
      node = {std::min(node.begin, sibling->first.begin), std::max(node.end, sibling->first.end)};
    }
    values_.emplace(node, std::move(value));
  }

  /// The other half of this node, if it is there. The caller adds it.
  std::optional<std::pair<PartRange, Value>> take_sibling(const PartRange& node) {
    const auto sibling = tree_.sibling_of(node);
    if (!sibling) return std::nullopt;
    auto found = values_.extract(*sibling);
    if (found.empty()) return std::nullopt;
    return std::pair(*sibling, std::move(found.mapped()));
  }

  /// What could not be added further, from left to right.
  std::map<PartRange, Value>& values() { return values_; }

 private:
  const PartTree& tree_;
  Add add_;
  std::map<PartRange, Value> values_;
};

/// The sum of the parts' numbers in the order of their tree: [part].
double sum_in_tree(const PartTree& tree, const std::vector<double>& numbers);

}  // namespace lockstep
