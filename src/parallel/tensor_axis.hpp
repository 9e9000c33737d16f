#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "device/parameter_notes.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

using AxisPtr = std::shared_ptr<const Communicator>;

/// What a FeatureSplit divides: `parts` equal blocks, each in pieces of whole `unit`s.
struct Features {
  std::string_view what;  ///< in errors: "output features of ColumnLinear"
  int64_t count = 0;
  int64_t parts = 1;
  int64_t unit = 1;
};

/// How the features of one layer are divided: each part over the ranks by torch.tensor_split's
/// rule, in whole units. A rank's own features are its pieces of all parts, one after the other.
class FeatureSplit {
 public:
  FeatureSplit(const Features& features, const Communicator& axis);

  int64_t features() const { return features_; }
  int64_t own() const { return parts_ * piece_[rank_]; }
  int64_t first() const { return first_[rank_]; }  ///< of this rank's features in each part

  /// This rank's features of `whole` along `dim`, by ordinary operations that autograd can record.
  torch::Tensor slice(const torch::Tensor& whole, int64_t dim) const;

  /// Where slice() lies in a tensor of this shape.
  Slice position(const Shape& whole, size_t dim) const;

  /// All ranks' features along `dim`, in their order. Collective; autograd does not record it.
  torch::Tensor gather(const Communicator& axis, const torch::Tensor& own, int64_t dim,
                       std::string_view label) const;

 private:
  int64_t features_;
  int64_t parts_;
  size_t rank_;
  std::vector<int64_t> piece_;  // [rank] features of one part
  std::vector<int64_t> first_;  // [rank] where they start in the part
};

/// The ranks of a layer and the features of each.
struct ShardAxis {
  Communicator comm;
  FeatureSplit split;
};
using ShardAxisPtr = std::shared_ptr<const ShardAxis>;

inline AxisPtr axis_of(const ShardAxisPtr& shard) {
  return {shard, &shard->comm};
}

/// The same features on another communicator of the same ranks.
ShardAxisPtr on_axis(const ShardAxis& shard, const Communicator& axis);
void require_same_axis_rank(const Communicator& old, const Communicator& axis);

/// This rank's slice of a whole parameter as a parameter of its own. What clipping and checkpoints
/// must know of it is noted.
torch::Tensor own_parameter(const torch::Tensor& whole, int64_t dim, const ShardAxisPtr& shard);
void note_shard(const torch::Tensor& parameter, const ShardAxisPtr& shard);

// Note [Mappings of a tensor axis]
// Each function below is a pair: what it communicates forward, and its conjugate backward. Features
// are the last dimension. A sequence is divided along the second to last dimension, in equal
// slices. In Megatron's words, in this order: copy to, reduce from, gather from and scatter to the
// tensor-parallel region; then the same for the sequence-parallel region. They cannot be
// differentiated twice: communication is not recorded.

/// x; its gradient is summed over the ranks.
torch::Tensor sum_gradient(const torch::Tensor& x, const AxisPtr& axis);

/// The same for small weights of one dtype, in one all_reduce. Undefined ones stay so.
std::vector<torch::Tensor> sum_gradients(const std::vector<torch::Tensor>& weights,
                                         const AxisPtr& axis);

/// The sum over ranks of `partial`, a product that was just computed; its values are overwritten.
torch::Tensor sum_partial(const torch::Tensor& partial, const Communicator& axis,
                          std::string_view label);

/// All ranks' features; backward passes on this rank's part of the gradient.
torch::Tensor gather_features(const torch::Tensor& own, const ShardAxisPtr& shard);

/// This rank's features; backward gathers the gradient.
torch::Tensor scatter_features(const torch::Tensor& x, const ShardAxisPtr& shard);

/// Gathers whole sequences from slices. `sums`: each rank has a part of the gradient, and backward
/// reduce-scatters it; otherwise all have the same, and backward takes this rank's slice.
torch::Tensor gather_sequence(const torch::Tensor& own, const AxisPtr& axis, bool sums);

/// The slice of a sequence that is the same on all ranks; backward gathers the gradient.
torch::Tensor scatter_sequence(const torch::Tensor& whole, const AxisPtr& axis);

/// This rank's slice of the sum over ranks; backward gathers the gradient.
torch::Tensor reduce_scatter_sequence(const torch::Tensor& partial, const AxisPtr& axis);

/// Refuses a tensor without a dimension of positions, or whose positions the ranks cannot share
/// evenly. `who` asks.
void require_sequence(std::string_view who, const torch::Tensor& whole, const Communicator& axis);

}  // namespace lockstep
