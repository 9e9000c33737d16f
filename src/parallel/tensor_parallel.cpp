#include "lockstep/tensor_parallel.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "device/slice_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/split.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {

/// How the features of one layer are divided: into `parts` equal blocks, each of which is divided
/// over the ranks by torch.tensor_split's rule. A rank's own features are its pieces of all parts,
/// one after the other.
class FeatureSplit {
 public:
  /// `what` names the features in errors: "output features of ColumnLinear".
  FeatureSplit(std::string_view what, int64_t features, int64_t parts, const Communicator& axis);

  int64_t features() const { return features_; }
  int64_t own() const { return parts_ * piece_[rank_]; }

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
        fmt::format("{} {}{} cannot be divided over {} ranks: each needs at least one", features,
                    what, parts > 1 ? fmt::format(" in {} parts", parts) : "", axis.size()),
        fmt::format("use at most {} ranks on this axis, or a wider layer",
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

/// The ranks of a layer and the features of each.
struct ShardAxis {
  Communicator comm;
  FeatureSplit split;
};

namespace {

namespace F = torch::nn::functional;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using ShardAxisPtr = std::shared_ptr<const ShardAxis>;

constexpr const char* kShard = "shard";
constexpr const char* kColumnFeatures = "output features of ColumnLinear";
constexpr const char* kRowFeatures = "input features of RowLinear";

// What a recorded forward keeps for its backward.
struct KeptShard : torch::CustomClassHolder {
  explicit KeptShard(ShardAxisPtr given) : shard(std::move(given)) {}
  ShardAxisPtr shard;
};

void keep(AutogradContext* context, const ShardAxisPtr& shard) {
  context->saved_data[kShard] = c10::IValue::make_capsule(c10::make_intrusive<KeptShard>(shard));
}

ShardAxisPtr kept(AutogradContext* context) {
  // Communication is not recorded by autograd, so its derivative would be wrong.
  if (torch::GradMode::is_enabled()) {
    throw Error(Code::kEngine,
                "a tensor-parallel layer cannot be differentiated twice (create_graph = true)",
                "use a plain Linear for the part that needs second derivatives");
  }
  return static_cast<KeptShard&>(*context->saved_data[kShard].toCapsule()).shard;
}

// Returns x; sums its gradient over the ranks.
struct SumGradient : Function<SumGradient> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const ShardAxisPtr& shard) {
    keep(context, shard);
    return x;
  }
  // Linear's backward has just computed this gradient for this node alone, so it may be
  // overwritten.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto shard = kept(context);
    const auto sum = gradients[0].contiguous();
    shard->comm.all_reduce(sum, ReduceOp::kSum, {.label = "tp column backward"});
    return {sum, {}};
  }
};

// Returns this rank's features of x; gathers the gradient of x from all ranks.
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

// Returns all ranks' features; passes on this rank's part of the gradient.
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

// Sums `partial`, a product that was just computed, over the ranks, and overwrites it.
//
// Note [Sum behind autograd]
// The gradient of each rank's term is the gradient of the sum over ranks. So nothing has to be
// recorded: the sum replaces the term's values in place, and the term's history stays valid, since
// a product keeps its operands and not its result for backward.
torch::Tensor sum_partial(const torch::Tensor& partial, const ShardAxis& shard) {
  const auto sum = partial.contiguous();
  shard.comm.all_reduce(sum.detach(), ReduceOp::kSum, {.label = "tp row forward"});
  return sum;
}

torch::Tensor own_copy(const torch::Tensor& values) {
  return values.detach().clone(at::MemoryFormat::Contiguous);
}

ShardAxisPtr on_axis(const ShardAxis& shard, const Communicator& axis) {
  if (axis.size() == shard.comm.size() && axis.rank() == shard.comm.rank()) {
    return std::make_shared<const ShardAxis>(ShardAxis{axis, shard.split});
  }
  throw Error(Code::kTensorMismatch,
              fmt::format("a layer divided for rank {} of {} was given an axis where this is rank "
                          "{} of {}",
                          shard.comm.rank(), shard.comm.size(), axis.rank(), axis.size()),
              "give a communicator of the same ranks in the same order, such as a split of the "
              "first");
}

// The norm of the whole model counts every slice, but a weight that all ranks have only once.
void note_shard(const torch::Tensor& parameter, const ShardAxisPtr& shard) {
  if (parameter.defined()) {
    note_tensor_shard(parameter, std::shared_ptr<const Communicator>(shard, &shard->comm));
  }
}

// Called before any rank waits, so a wrong input is reported on each rank that has it.
void require_features(const char* layer, const torch::Tensor& x, int64_t needed,
                      const ShardAxis& shard, const char* help) {
  const int64_t given = x.dim() == 0 ? 0 : x.size(-1);
  if (given == needed) return;
  throw Error(Code::kTensorMismatch,
              fmt::format("{} on rank {} of {} takes {} input features, but was given {}", layer,
                          shard.comm.rank(), shard.comm.size(), needed, given),
              help);
}

}  // namespace

ColumnLinearImpl::ColumnLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                                   const ColumnLinearOptions& options)
    : options_(options),
      shard_(std::make_shared<const ShardAxis>(ShardAxis{
          axis, FeatureSplit(kColumnFeatures, whole->weight.size(0), options.parts, axis)})) {
  const auto& split = shard_->split;
  weight = register_parameter("weight", own_copy(split.slice(whole->weight, 0)),
                              whole->weight.requires_grad());
  if (whole->bias.defined()) {
    bias = register_parameter("bias", own_copy(split.slice(whole->bias, 0)),
                              whole->bias.requires_grad());
  }
  note_shard(weight, shard_);
  note_shard(bias, shard_);
  if (axis.size() == 1) return;
  note_slice(weight, split.position(whole->weight.sizes().vec(), 0));
  if (bias.defined()) note_slice(bias, split.position(whole->bias.sizes().vec(), 0));
}

ColumnLinearImpl::~ColumnLinearImpl() = default;

torch::Tensor ColumnLinearImpl::forward(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight, bias);
  require_features("ColumnLinear", x, weight.size(1), *shard_,
                   "give the whole input, the same on all ranks");
  const auto own = F::linear(SumGradient::apply(x, shard_), weight, bias);
  return options_.gather_output ? GatherFeatures::apply(own, shard_) : own;
}

torch::Tensor ColumnLinearImpl::whole_weight() const {
  if (axis().size() == 1) return weight.detach();
  return shard_->split.gather(axis(), weight, 0, "tp column weight");
}

torch::Tensor ColumnLinearImpl::whole_bias() const {
  if (!bias.defined() || axis().size() == 1) return bias.defined() ? bias.detach() : bias;
  return shard_->split.gather(axis(), bias, 0, "tp column bias");
}

const Communicator& ColumnLinearImpl::axis() const {
  return shard_->comm;
}

void ColumnLinearImpl::set_axis(const Communicator& axis) {
  shard_ = on_axis(*shard_, axis);
  note_shard(weight, shard_);
  note_shard(bias, shard_);
}

void ColumnLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::ColumnLinear(in_features={}, out_features={} of {}, bias={})",
                        weight.size(1), weight.size(0), shard_->split.features(), bias.defined());
}

RowLinearImpl::RowLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                             const RowLinearOptions& options)
    : options_(options),
      shard_(std::make_shared<const ShardAxis>(
          ShardAxis{axis, FeatureSplit(kRowFeatures, whole->weight.size(1), 1, axis)})) {
  weight = register_parameter("weight", own_copy(shard_->split.slice(whole->weight, 1)),
                              whole->weight.requires_grad());
  note_shard(weight, shard_);
  if (axis.size() > 1) {
    note_slice(weight, shard_->split.position(whole->weight.sizes().vec(), 1));
  }
  if (!whole->bias.defined()) return;
  bias = register_parameter("bias", own_copy(whole->bias), whole->bias.requires_grad());
}

RowLinearImpl::~RowLinearImpl() = default;

torch::Tensor RowLinearImpl::forward(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight, bias);
  if (options_.scatter_input) {
    require_features("RowLinear", x, shard_->split.features(), *shard_,
                     "give the whole input, or construct the layer without scatter_input");
  } else {
    require_features(
        "RowLinear", x, shard_->split.own(), *shard_,
        "give the output of a ColumnLinear without gather_output, or set scatter_input "
        "for a whole input");
  }
  const auto own = options_.scatter_input ? ScatterFeatures::apply(x, shard_) : x;
  const auto sum = sum_partial(F::linear(own, weight), *shard_);
  // Under autocast the product has the lower precision, as a plain Linear's result does.
  return bias.defined() ? sum + bias.to(sum.scalar_type()) : sum;
}

torch::Tensor RowLinearImpl::whole_weight() const {
  if (axis().size() == 1) return weight.detach();
  return shard_->split.gather(axis(), weight, 1, "tp row weight");
}

torch::Tensor RowLinearImpl::whole_bias() const {
  return bias.defined() ? bias.detach() : bias;
}

const Communicator& RowLinearImpl::axis() const {
  return shard_->comm;
}

void RowLinearImpl::set_axis(const Communicator& axis) {
  shard_ = on_axis(*shard_, axis);
  note_shard(weight, shard_);
}

void RowLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::RowLinear(in_features={} of {}, out_features={}, bias={})",
                        weight.size(1), shard_->split.features(), weight.size(0), bias.defined());
}

void abort_tensor_axes(const torch::nn::Module& module, std::string_view reason) {
  const auto abort = [&](const Communicator& axis) {
    if (axis.size() > 1) axis.abort(reason);
  };
  if (const auto* column = module.as<ColumnLinearImpl>()) abort(column->axis());
  if (const auto* row = module.as<RowLinearImpl>()) abort(row->axis());
  for (const auto& child : module.children()) abort_tensor_axes(*child, reason);
}

void set_tensor_axis(torch::nn::Module& module, const Communicator& axis) {
  // modules() would need a shared pointer to the outermost module, which may live on the stack.
  if (auto* column = module.as<ColumnLinearImpl>()) column->set_axis(axis);
  if (auto* row = module.as<RowLinearImpl>()) row->set_axis(axis);
  for (const auto& child : module.children()) set_tensor_axis(*child, axis);
}

}  // namespace lockstep
