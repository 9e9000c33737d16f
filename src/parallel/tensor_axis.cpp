#include "parallel/tensor_axis.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "lockstep/tensor_text.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {

FeatureSplit::FeatureSplit(const Features& features, const Communicator& axis)
    : features_(features.count), parts_(features.parts), rank_(static_cast<size_t>(axis.rank())) {
  const auto& [what, count, parts, unit] = features;
  if (parts < 1 || count % parts != 0) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} {} do not make {} equal parts", count, what, parts),
                "give the number of equal blocks that the features are made of, such as 3 for q, "
                "k and v");
  }
  if (unit < 1 || count / parts % unit != 0) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} {} are not made of units of {}", count / parts, what, unit),
                "give the number of features that stay together, such as the width of a head");
  }
  const int64_t units = count / parts / unit;
  if (units < axis.size()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} {}{}{} cannot be divided over {} ranks: each needs at least one",
                            count, what, parts > 1 ? fmt::format(" in {} parts", parts) : "",
                            unit > 1 ? fmt::format(" in units of {}", unit) : "", axis.size()),
                fmt::format("use at most {} ranks on this axis, or a wider layer",
                            std::max<int64_t>(1, units)));
  }
  piece_ = tensor_split_rows(units, axis.size());
  int64_t first = 0;
  for (int64_t& piece : piece_) {
    piece *= unit;
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

Slice FeatureSplit::position(const Shape& whole, size_t dim) const {
  Slice slice{whole, whole, {}};
  slice.local[dim] = own();
  for (int64_t part = 0; part < parts_; ++part) {
    Block block{Shape(whole.size(), 0), Shape(whole.size(), 0), slice.local};
    block.shape[dim] = piece_[rank_];
    block.local[dim] = part * piece_[rank_];
    block.whole[dim] = part * (features_ / parts_) + first_[rank_];
    slice.blocks.push_back(std::move(block));
  }
  return slice;
}

// Blocks of an all_gather are equal: a rank with fewer features than rank 0 pads its block.
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

void require_same_axis_rank(const Communicator& old, const Communicator& axis) {
  if (axis.size() == old.size() && axis.rank() == old.rank()) return;
  throw Error(Code::kTensorMismatch,
              fmt::format("a layer divided for rank {} of {} was given an axis where this is rank "
                          "{} of {}",
                          old.rank(), old.size(), axis.rank(), axis.size()),
              "give a communicator of the same ranks in the same order, such as a split of the "
              "first");
}

ShardAxisPtr on_axis(const ShardAxis& shard, const Communicator& axis) {
  require_same_axis_rank(shard.comm, axis);
  return std::make_shared<const ShardAxis>(ShardAxis{axis, shard.split});
}

// The norm of the whole model counts every slice, but a weight that all ranks have only once.
void note_shard(const torch::Tensor& parameter, const ShardAxisPtr& shard) {
  if (parameter.defined()) note_tensor_shard(parameter, axis_of(shard));
}

torch::Tensor own_parameter(const torch::Tensor& whole, int64_t dim, const ShardAxisPtr& shard) {
  auto own = shard->split.slice(whole.detach(), dim).clone(at::MemoryFormat::Contiguous);
  own.set_requires_grad(whole.requires_grad());
  note_shard(own, shard);
  if (shard->comm.size() > 1) {
    note_slice(own, shard->split.position(whole.sizes().vec(), static_cast<size_t>(dim)));
  }
  return own;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kKept = "kept";
constexpr int64_t kPositions = -2;  // the dimension that a sequence is divided along

// What a recorded forward keeps for its backward.
template <class T>
struct KeptPointer : torch::CustomClassHolder {
  explicit KeptPointer(std::shared_ptr<const T> given) : pointer(std::move(given)) {}
  std::shared_ptr<const T> pointer;
};

template <class T>
void keep(AutogradContext* context, const std::shared_ptr<const T>& pointer) {
  context->saved_data[kKept] =
      c10::IValue::make_capsule(c10::make_intrusive<KeptPointer<T>>(pointer));
}

// Called in backward.
template <class T>
std::shared_ptr<const T> kept(AutogradContext* context) {
  // Communication is not recorded by autograd, so its derivative would be wrong.
  if (torch::GradMode::is_enabled()) {
    throw Error(Code::kEngine,
                "a tensor-parallel layer cannot be differentiated twice (create_graph = true)",
                "use a plain Linear for the part that needs second derivatives");
  }
  return static_cast<KeptPointer<T>&>(*context->saved_data[kKept].toCapsule()).pointer;
}

torch::Tensor own_positions(const torch::Tensor& whole, const Communicator& axis) {
  const int64_t own = whole.size(kPositions) / axis.size();
  return whole.narrow(kPositions, axis.rank() * own, own);
}

// [rank, ..., own positions, features] as [..., positions, features]: a copy unless one row is
// all there is.
torch::Tensor join_positions(const torch::Tensor& blocks) {
  auto sizes = blocks.sizes().vec();
  sizes.erase(sizes.begin());
  sizes[sizes.size() - 2] *= blocks.size(0);
  return blocks.movedim(0, -3).reshape(sizes);
}

torch::Tensor all_gather_positions(const torch::Tensor& own, const Communicator& axis,
                                   std::string_view label) {
  const auto block = own.detach().contiguous();
  auto sizes = block.sizes().vec();
  sizes.insert(sizes.begin(), axis.size());
  const auto blocks = torch::empty(sizes, block.options());
  axis.all_gather(blocks, block, {.label = label});
  return join_positions(blocks);
}

torch::Tensor reduce_scatter_positions(const torch::Tensor& partial, const Communicator& axis,
                                       std::string_view label) {
  auto sizes = partial.sizes().vec();
  sizes[sizes.size() - 2] /= axis.size();
  auto own_sizes = sizes;
  sizes.insert(sizes.end() - 2, axis.size());
  const auto blocks = partial.detach().reshape(sizes).movedim(-3, 0).contiguous();
  const auto own = torch::empty(own_sizes, blocks.options());
  axis.reduce_scatter(own, blocks, ReduceOp::kSum, {.label = label});
  return own;
}

struct SumGradient : Function<SumGradient> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const AxisPtr& axis) {
    keep(context, axis);
    return x;
  }
  // Linear's backward has just computed this gradient for this node alone, so it may be
  // overwritten.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto axis = kept<Communicator>(context);
    const auto sum = gradients[0].contiguous();
    axis->all_reduce(sum, ReduceOp::kSum, {.label = "tp column backward"});
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
    const auto shard = kept<ShardAxis>(context);
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
    return {kept<ShardAxis>(context)->split.slice(gradients[0], -1), {}};
  }
};

struct GatherSequence : Function<GatherSequence> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& own,
                               const AxisPtr& axis, bool sums) {
    keep(context, axis);
    context->saved_data["sums"] = sums;
    return all_gather_positions(own, *axis, "sp gather forward");
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto axis = kept<Communicator>(context);
    const bool sums = context->saved_data["sums"].toBool();
    return {sums ? reduce_scatter_positions(gradients[0], *axis, "sp gather backward")
                 : own_positions(gradients[0], *axis),
            {},
            {}};
  }
};

struct ScatterSequence : Function<ScatterSequence> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& whole,
                               const AxisPtr& axis) {
    keep(context, axis);
    return own_positions(whole, *axis);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {all_gather_positions(gradients[0], *kept<Communicator>(context), "sp scatter backward"),
            {}};
  }
};

struct ReduceScatterSequence : Function<ReduceScatterSequence> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& partial,
                               const AxisPtr& axis) {
    keep(context, axis);
    return reduce_scatter_positions(partial, *axis, "sp reduce-scatter forward");
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {all_gather_positions(gradients[0], *kept<Communicator>(context),
                                 "sp reduce-scatter backward"),
            {}};
  }
};

}  // namespace

torch::Tensor sum_gradient(const torch::Tensor& x, const AxisPtr& axis) {
  return SumGradient::apply(x, axis);
}

// The weights travel through one flat copy, whose gradient autograd computes for this node alone.
std::vector<torch::Tensor> sum_gradients(const std::vector<torch::Tensor>& weights,
                                         const AxisPtr& axis) {
  std::vector<torch::Tensor> flat;
  for (const auto& weight : weights) {
    if (weight.defined()) flat.push_back(weight.flatten());
  }
  if (axis->size() == 1 || flat.empty()) return weights;
  const auto all = SumGradient::apply(torch::cat(flat), axis);
  std::vector<torch::Tensor> summed;
  int64_t first = 0;
  for (const auto& weight : weights) {
    summed.push_back(weight.defined() ? all.narrow(0, first, weight.numel()).view(weight.sizes())
                                      : weight);
    if (weight.defined()) first += weight.numel();
  }
  return summed;
}

// Note [Sum behind autograd]
// The gradient of each rank's term is the gradient of the sum over ranks. So nothing has to be
// recorded: the sum replaces the term's values in place, and the term's history stays valid, since
// a product keeps its operands and not its result for backward.
torch::Tensor sum_partial(const torch::Tensor& partial, const Communicator& axis,
                          std::string_view label) {
  const auto sum = partial.contiguous();
  axis.all_reduce(sum.detach(), ReduceOp::kSum, {.label = label});
  return sum;
}

torch::Tensor gather_features(const torch::Tensor& own, const ShardAxisPtr& shard) {
  return GatherFeatures::apply(own, shard);
}

torch::Tensor scatter_features(const torch::Tensor& x, const ShardAxisPtr& shard) {
  return ScatterFeatures::apply(x, shard);
}

torch::Tensor gather_sequence(const torch::Tensor& own, const AxisPtr& axis, bool sums) {
  return GatherSequence::apply(own, axis, sums);
}

torch::Tensor scatter_sequence(const torch::Tensor& whole, const AxisPtr& axis) {
  return ScatterSequence::apply(whole, axis);
}

torch::Tensor reduce_scatter_sequence(const torch::Tensor& partial, const AxisPtr& axis) {
  return ReduceScatterSequence::apply(partial, axis);
}

void require_sequence(std::string_view who, const torch::Tensor& whole, const Communicator& axis) {
  if (whole.dim() < 2) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} was given {}, which has no dimension of positions", who,
                            shape_text(whole.sizes())),
                "give [..., positions, features]");
  }
  const int64_t positions = whole.size(kPositions);
  if (positions % axis.size() == 0 && positions > 0) return;
  const int64_t longer = (positions / axis.size() + 1) * axis.size();
  throw Error(Code::kTensorMismatch,
              fmt::format("{}: {} positions cannot be divided evenly over the {} ranks of a "
                          "sequence-parallel axis",
                          who, positions, axis.size()),
              fmt::format("pad sequences at their end to {} positions and ignore the targets of "
                          "the padding, or leave sequence_parallel off",
                          longer));
}

}  // namespace lockstep
