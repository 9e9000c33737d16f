#include "parallel/tensor_parallel_shards.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/error.hpp"
#include "lockstep/split.hpp"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kShard = "shard";

// What a recorded forward keeps for its backward.
struct KeptShard : torch::CustomClassHolder {
  explicit KeptShard(ShardAxisPtr given) : shard(std::move(given)) {}
  ShardAxisPtr shard;
};

void keep(AutogradContext* context, const ShardAxisPtr& shard) {
  context->saved_data[kShard] = c10::IValue::make_capsule(c10::make_intrusive<KeptShard>(shard));
}

ShardAxisPtr kept(AutogradContext* context) {
  // What a communicator moves has no history, so that a derivative of it would be wrong.
  if (torch::GradMode::is_enabled()) {
    throw Error(Code::kEngine,
                "a tensor-parallel layer cannot be differentiated twice (create_graph = true)",
                "use a plain Linear for the part that needs second derivatives");
  }
  return static_cast<KeptShard&>(*context->saved_data[kShard].toCapsule()).shard;
}

struct SumGradient : Function<SumGradient> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const ShardAxisPtr& shard) {
    keep(context, shard);
    return x;
  }
  // The gradient is the product that linear's backward has just made for this node alone, so that
  // it may be overwritten.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto shard = kept(context);
    const auto sum = gradients[0].contiguous();
    shard->comm.all_reduce(sum, ReduceOp::kSum, {.label = "tp column backward"});
    return {sum, {}};
  }
};

struct ScatterFeatures : Function<ScatterFeatures> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const ShardAxisPtr& shard) {
    keep(context, shard);
    return shard->split.slice(x, -1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto shard = kept(context);
    return {shard->split.gather(shard->comm, gradients[0], -1, "tp row backward"), {}};
  }
};

struct GatherFeatures : Function<GatherFeatures> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& own,
                               const ShardAxisPtr& shard) {
    keep(context, shard);
    return shard->split.gather(shard->comm, own, -1, "tp column forward");
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {kept(context)->split.slice(gradients[0], -1), {}};
  }
};

}  // namespace

FeatureSplit::FeatureSplit(std::string_view what, int64_t features, int64_t parts,
                           const Communicator& axis)
    : features_(features), parts_(parts), rank_(static_cast<size_t>(axis.rank())) {
  if (parts < 1 || features % parts != 0) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} {} do not make {} equal parts", features, what, parts),
                "give the number of equal blocks that the features are made of, such as 3 for q, "
                "k and v");
  }
  if (features / parts < axis.size()) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("{} {}{} cannot be divided over {} ranks: each needs one at least", features,
                    what, parts > 1 ? fmt::format(" in {} parts", parts) : "", axis.size()),
        fmt::format("use {} ranks at most on this axis, or a wider layer",
                    std::max<int64_t>(1, features / parts)));
  }
  piece_ = tensor_split_rows(features / parts, axis.size());
  int64_t first = 0;
  for (const int64_t piece : piece_) {
    first_.push_back(first);
    first += piece;
  }
}

torch::Tensor FeatureSplit::slice(const torch::Tensor& whole, int64_t dim) const {
  if (parts_ == 1) return whole.narrow(dim, first_[rank_], piece_[rank_]);
  std::vector<torch::Tensor> pieces;
  for (int64_t part = 0; part < parts_; ++part) {
    pieces.push_back(whole.narrow(dim, part * (features_ / parts_) + first_[rank_], piece_[rank_]));
  }
  return torch::cat(pieces, dim);
}

// Blocks of an all_gather are equal: a rank with fewer features than rank 0 fills up.
torch::Tensor FeatureSplit::gather(const Communicator& axis, const torch::Tensor& own, int64_t dim,
                                   std::string_view label) const {
  const torch::NoGradGuard no_grad;
  auto sizes = own.sizes().vec();
  const size_t along = static_cast<size_t>(dim < 0 ? dim + own.dim() : dim);
  sizes[along] = parts_ * piece_[0];
  auto block = own.detach().contiguous();
  if (piece_[rank_] < piece_[0]) {
    block = torch::zeros(sizes, own.options().requires_grad(false));
    block.narrow(dim, 0, this->own()).copy_(own);
  }
  sizes.insert(sizes.begin(), axis.size());
  const auto blocks = torch::empty(sizes, block.options());
  axis.all_gather(blocks, block, {.label = label});
  std::vector<torch::Tensor> pieces;
  for (int64_t part = 0; part < parts_; ++part) {
    for (size_t rank = 0; rank < piece_.size(); ++rank) {
      pieces.push_back(
          blocks[static_cast<int64_t>(rank)].narrow(dim, part * piece_[rank], piece_[rank]));
    }
  }
  return torch::cat(pieces, dim);
}

torch::Tensor sum_gradient(const torch::Tensor& x, const ShardAxisPtr& shard) {
  return SumGradient::apply(x, shard);
}

torch::Tensor scatter_features(const torch::Tensor& x, const ShardAxisPtr& shard) {
  return ScatterFeatures::apply(x, shard);
}

torch::Tensor gather_features(const torch::Tensor& own, const ShardAxisPtr& shard) {
  return GatherFeatures::apply(own, shard);
}

// Note [Sum behind autograd]
// The gradient of a sum over ranks is, for each rank's term, the gradient of the sum. So nothing
// has to be recorded: the term's values are replaced by the sum's where they lie, and its history,
// which a product keeps for its operands and not for its result, stays right.
torch::Tensor sum_partial(const torch::Tensor& partial, const ShardAxis& shard) {
  const auto sum = partial.contiguous();
  shard.comm.all_reduce(sum.detach(), ReduceOp::kSum, {.label = "tp row forward"});
  return sum;
}

}  // namespace lockstep
