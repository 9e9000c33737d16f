#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "buckets/part_tree.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// A gradient and its place in a flat sum.
struct GradientPiece {
  int64_t offset = 0;
  int64_t count = 0;
  torch::Tensor gradient;  ///< undefined: zeros
};

/// A collective that carried sums.
struct SumExchange {
  int64_t bytes = 0;  ///< of the sums
  int64_t begun_ns = 0;
  int64_t ended_ns = 0;
};

/// Adds the gradients of a global batch's parts in the order of a PartTree: first those of this
/// rank's own parts, then the ranks' sums. At any time it holds at most about log2(V / R) sums of
/// this rank.
///
/// Note [Bits of a sum]: an element is added to, multiplied and divided alone, each time rounded to
/// the nearest value of the sum's type. So neither the place of an element nor the number of
/// threads or ranks changes its bits. What a part lacks counts as a zero that is added, since
/// adding one turns -0 into 0. Gradients of a low precision are added in float32 and rounded once,
/// at the end.
class PartSums {
 public:
  /// `options` are those of the gradients; `elements` at least the end of the last piece. `tree`
  /// must outlive this object.
  PartSums(const PartTree& tree, const Communicator& comm, int64_t elements,
           const torch::TensorOptions& options);
  PartSums(const PartSums&) = delete;
  PartSums& operator=(const PartSums&) = delete;

  void begin_step();

  /// Adds a part's gradients, each multiplied by `weight`.
  void add(int64_t part, std::span<const GradientPiece> pieces, double weight);

  /// Returns the sum of all parts divided by `divisor`, on every rank, as `elements` or more
  /// numbers in memory that the next step overwrites. The ranks exchange about `chunk_bytes` at
  /// once. Collective.
  torch::Tensor all_reduce(double divisor, int64_t chunk_bytes);

  /// Writes the r-th of size() equal blocks of the sum of all parts divided by `divisor` to
  /// `block`, on rank r. Collective.
  void reduce_scatter(const torch::Tensor& block, double divisor, const std::string& label);

  /// Gives the memory of all sums back.
  void release();

  /// The collectives of this step.
  const std::vector<SumExchange>& exchanges() const { return exchanges_; }

 private:
  torch::Tensor take_memory();
  torch::Tensor add_two(torch::Tensor left, const torch::Tensor& right);
  std::vector<torch::Tensor> own_sums();
  torch::Tensor exchange(const std::vector<torch::Tensor>& sums, const std::string& label);

  const PartTree& tree_;
  const Communicator comm_;
  const int64_t elements_;  // with what fills them up
  const torch::TensorOptions options_;
  PartFold<torch::Tensor> fold_;
  std::vector<torch::Tensor> free_;  // memory of sums that were added to others
  std::vector<SumExchange> exchanges_;
};

}  // namespace lockstep
