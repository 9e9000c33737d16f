#include "lockstep/tensor_parallel.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <unordered_set>

#include "base/mutation.hpp"
#include "lockstep/error.hpp"
#include "parallel/tensor_axis.hpp"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;

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

ShardAxisPtr divide(const Features& features, const Communicator& axis) {
  return std::make_shared<const ShardAxis>(ShardAxis{axis, FeatureSplit(features, axis)});
}

void refuse_with_sequence(const char* layer, const char* option, bool both) {
  if (!both) return;
  throw Error(Code::kUsage,
              fmt::format("{} was given both {} and sequence_parallel", layer, option),
              "choose one: a pair of ColumnLinear and RowLinear with sequence_parallel needs "
              "neither gather_output nor scatter_input");
}

}  // namespace

ColumnLinearImpl::ColumnLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                                   const ColumnLinearOptions& options)
    : ColumnLinearImpl(whole->weight, whole->bias, axis, options) {}

ColumnLinearImpl::ColumnLinearImpl(const torch::Tensor& whole_weight,
                                   const torch::Tensor& whole_bias, const Communicator& axis,
                                   const ColumnLinearOptions& options)
    : options_(options),
      shard_(divide(
          {"output features of ColumnLinear", whole_weight.size(0), options.parts, options.unit},
          axis)) {
  refuse_with_sequence("ColumnLinear", "gather_output",
                       options.gather_output && options.sequence_parallel);
  weight = register_parameter("weight", own_parameter(whole_weight, 0, shard_),
                              whole_weight.requires_grad());
  if (!whole_bias.defined()) return;
  bias =
      register_parameter("bias", own_parameter(whole_bias, 0, shard_), whole_bias.requires_grad());
}

ColumnLinearImpl::~ColumnLinearImpl() = default;

torch::Tensor ColumnLinearImpl::forward(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight, bias);
  require_features("ColumnLinear", x, weight.size(1), *shard_,
                   "give the whole input, the same on all ranks");
  if (options_.sequence_parallel) {
    return F::linear(gather_sequence(x, axis_of(shard_), /*sums=*/true), weight, bias);
  }
  const auto own = F::linear(sum_gradient(x, axis_of(shard_)), weight, bias);
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

torch::Tensor ColumnLinearImpl::whole_of(const std::string& parameter) const {
  return parameter == "weight" ? whole_weight() : whole_bias();
}

void ColumnLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::ColumnLinear(in_features={}, out_features={} of {}, bias={})",
                        weight.size(1), weight.size(0), shard_->split.features(), bias.defined());
}

RowLinearImpl::RowLinearImpl(const torch::nn::Linear& whole, const Communicator& axis,
                             const RowLinearOptions& options)
    : RowLinearImpl(whole->weight, whole->bias, axis, options) {}

RowLinearImpl::RowLinearImpl(const torch::Tensor& whole_weight, const torch::Tensor& whole_bias,
                             const Communicator& axis, const RowLinearOptions& options)
    : options_(options),
      shard_(divide({.what = "input features of RowLinear",
                     .count = whole_weight.size(1),
                     .unit = options.unit},
                    axis)) {
  refuse_with_sequence("RowLinear", "scatter_input",
                       options.scatter_input && options.sequence_parallel);
  weight = register_parameter("weight", own_parameter(whole_weight, 1, shard_),
                              whole_weight.requires_grad());
  if (!whole_bias.defined()) return;
  bias = register_parameter("bias", whole_bias.detach().clone(at::MemoryFormat::Contiguous),
                            whole_bias.requires_grad());
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
  if (options_.sequence_parallel) require_sequence("RowLinear", x, axis());
  const auto own = options_.scatter_input ? scatter_features(x, shard_) : x;
  const auto product = F::linear(own, weight);
  const auto sum = options_.sequence_parallel ? reduce_scatter_sequence(product, axis_of(shard_))
                                              : sum_partial(product, axis(), "tp row forward");
  if (!bias.defined()) return sum;
  const auto term = options_.sequence_parallel && torch::GradMode::is_enabled()
                        ? sum_gradients({bias}, axis_of(shard_))[0]
                        : bias;
  // Under autocast the product has the lower precision, as a plain Linear's result does.
  if (is_planted(Mutation::kBiasOnEveryRank))
    return sum + axis().size() * term.to(sum.scalar_type());
  return sum + term.to(sum.scalar_type());
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

torch::Tensor RowLinearImpl::whole_of(const std::string& parameter) const {
  return parameter == "weight" ? whole_weight() : whole_bias();
}

void RowLinearImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::RowLinear(in_features={} of {}, out_features={}, bias={})",
                        weight.size(1), shard_->split.features(), weight.size(0), bias.defined());
}

void abort_tensor_axes(const torch::nn::Module& module, std::string_view reason) {
  if (const auto* layer = dynamic_cast<const OnTensorAxis*>(&module)) {
    if (layer->axis().size() > 1) layer->axis().abort(reason);
  }
  for (const auto& child : module.children()) abort_tensor_axes(*child, reason);
}

void set_tensor_axis(torch::nn::Module& module, const Communicator& axis) {
  // modules() would need a shared pointer to the outermost module, which may live on the stack.
  if (auto* layer = dynamic_cast<OnTensorAxis*>(&module)) layer->set_axis(axis);
  for (const auto& child : module.children()) set_tensor_axis(*child, axis);
}

namespace {

void add_whole_parameters(const torch::nn::Module& module, const std::string& prefix,
                          std::unordered_set<const c10::TensorImpl*>& seen,
                          std::map<std::string, torch::Tensor>& all) {
  const auto* divided = dynamic_cast<const OnTensorAxis*>(&module);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const auto whole = divided != nullptr ? divided->whole_of(item.key()) : torch::Tensor();
    all[prefix + item.key()] = whole.defined() ? whole : item.value().detach();
  }
  for (const auto& child : module.named_children()) {
    add_whole_parameters(*child.value(), prefix + child.key() + ".", seen, all);
  }
}

}  // namespace

std::map<std::string, torch::Tensor> whole_parameters(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> all;
  std::unordered_set<const c10::TensorImpl*> seen;
  add_whole_parameters(module, "", seen, all);
  return all;
}

}  // namespace lockstep
