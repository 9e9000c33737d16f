#include "lockstep/tensor_parallel.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/error.hpp"
#include "parallel/tensor_parallel_shards.hpp"
#include "precision/model_parallel.hpp"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;

constexpr const char* kColumnFeatures = "output features of ColumnLinear";
constexpr const char* kRowFeatures = "input features of RowLinear";

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

// The norm of the whole model counts every slice, and what is whole only once.
void note_shard(const torch::Tensor& parameter, const ShardAxisPtr& shard) {
  if (parameter.defined()) {
    note_tensor_shard(parameter, std::shared_ptr<const Communicator>(shard, &shard->comm));
  }
}

// Before any rank waits: a wrong input on all ranks is found on all, on one it is named there.
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
}

ColumnLinearImpl::~ColumnLinearImpl() = default;

torch::Tensor ColumnLinearImpl::forward(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight, bias);
  require_features("ColumnLinear", x, weight.size(1), *shard_,
                   "give the whole input, the same on all ranks");
  const auto own = F::linear(sum_gradient(x, shard_), weight, bias);
  return options_.gather_output ? gather_features(own, shard_) : own;
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
  if (!whole->bias.defined()) return;
  bias = register_parameter("bias", own_copy(whole->bias), whole->bias.requires_grad());
}

RowLinearImpl::~RowLinearImpl() = default;

torch::Tensor RowLinearImpl::forward(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight, bias);
  if (options_.scatter_input) {
    require_features("RowLinear", x, shard_->split.features(), *shard_,
                     "give the whole input, or make the layer without scatter_input");
  } else {
    require_features("RowLinear", x, shard_->split.own(), *shard_,
                     "give what a ColumnLinear without gather_output makes, or set scatter_input "
                     "for a whole input");
  }
  const auto own = options_.scatter_input ? scatter_features(x, shard_) : x;
  const auto sum = sum_partial(F::linear(own, weight), *shard_);
  // Under autocast the product has the lower precision, and so has a plain Linear's result.
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
  // modules() would ask for a shared pointer to the outermost, which may live on the stack.
  if (auto* column = module.as<ColumnLinearImpl>()) column->set_axis(axis);
  if (auto* row = module.as<RowLinearImpl>()) row->set_axis(axis);
  for (const auto& child : module.children()) set_tensor_axis(*child, axis);
}

}  // namespace lockstep
