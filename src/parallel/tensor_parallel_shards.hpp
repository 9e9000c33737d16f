#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// How the features of one layer are divided: `parts` equal blocks, each of which goes to the ranks
/// by torch.tensor_split's rule. A rank's own features are its pieces of all parts, one after the
/// other.
class FeatureSplit {
 public:
  /// `what` names the features in errors: "output features of ColumnLinear".
  FeatureSplit(std::string_view what, int64_t features, int64_t parts, const Communicator& axis);

  int64_t features() const { return features_; }
  int64_t own() const { return parts_ * piece_[rank_]; }

  /// This rank's features of `whole` along `dim`. Ordinary operations: autograd may follow them.
  torch::Tensor slice(const torch::Tensor& whole, int64_t dim) const;

  /// All ranks' features along `dim`, in their order. Collective; outside autograd.
  torch::Tensor gather(const Communicator& axis, const torch::Tensor& own, int64_t dim,
                       std::string_view label) const;

 private:
  int64_t features_;
  int64_t parts_;
  size_t rank_;
  std::vector<int64_t> piece_;  // [rank]: features of one part
  std::vector<int64_t> first_;  // [rank]: where they begin in the part
};

/// A layer's ranks and what each has.
struct ShardAxis {
  Communicator comm;
  FeatureSplit split;
};

using ShardAxisPtr = std::shared_ptr<const ShardAxis>;

/// x itself; its gradient is summed over the ranks.
torch::Tensor sum_gradient(const torch::Tensor& x, const ShardAxisPtr& shard);

/// This rank's features of x; the gradient of x is put together from all ranks'.
torch::Tensor scatter_features(const torch::Tensor& x, const ShardAxisPtr& shard);

/// All ranks' features; the gradient that goes on is this rank's part.
torch::Tensor gather_features(const torch::Tensor& own, const ShardAxisPtr& shard);

/// `partial` summed over the ranks; its gradient is that of the sum. `partial` is the product just
/// made and is overwritten, see Note [Sum behind autograd].
torch::Tensor sum_partial(const torch::Tensor& partial, const ShardAxis& shard);

/// This rank gives up on every axis that a layer in `module` is divided over.
void abort_tensor_axes(const torch::nn::Module& module, std::string_view reason);

}  // namespace lockstep
