#include "lockstep/vocab_parallel.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/torch.h>

#include <limits>

#include "base/counted.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "parallel/tensor_axis.hpp"

namespace lockstep {
namespace {

namespace F = torch::nn::functional;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

ShardAxisPtr divide_rows(std::string_view what, int64_t rows, const Communicator& axis) {
  return std::make_shared<const ShardAxis>(
      ShardAxis{axis, FeatureSplit({.what = what, .count = rows}, axis)});
}

void refuse_option(const char* option, bool is_set) {
  if (!is_set) return;
  throw Error(Code::kUsage,
              fmt::format("VocabParallelEmbedding does not support an Embedding with {}", option),
              "use an Embedding without it, or a plain one, whole on every rank");
}

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(const torch::nn::Embedding& whole,
                                                       const Communicator& axis,
                                                       const VocabParallelOptions& options)
    : padding_idx_(whole->options.padding_idx().value_or(-1)),
      options_(options),
      shard_(divide_rows("rows of VocabParallelEmbedding", whole->weight.size(0), axis)) {
  refuse_option("max_norm", whole->options.max_norm().has_value());
  refuse_option("scale_grad_by_freq", whole->options.scale_grad_by_freq());
  refuse_option("sparse", whole->options.sparse());
  weight = register_parameter("weight", own_parameter(whole->weight, 0, shard_),
                              whole->weight.requires_grad());
}

VocabParallelEmbeddingImpl::~VocabParallelEmbeddingImpl() = default;

torch::Tensor VocabParallelEmbeddingImpl::forward(const torch::Tensor& ids) {
  if (axis().size() == 1) return torch::embedding(weight, ids, padding_idx_);
  // Only one rank would notice an id that is too large, and the others would wait for it.
  if (ids.is_cpu() && ids.numel() > 0 &&
      (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= rows())) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("VocabParallelEmbedding has {}, but was given ids from {} to {}",
                    counted(rows(), "row"), ids.min().item<int64_t>(), ids.max().item<int64_t>()),
        "give ids from 0 to one less than the rows of the whole Embedding");
  }
  if (options_.sequence_parallel) {
    require_sequence("VocabParallelEmbedding", ids.unsqueeze(-1), axis());
  }
  const auto own = ids - shard_->split.first();
  const auto elsewhere = own.lt(0).logical_or(own.ge(weight.size(0)));
  const int64_t padding = padding_idx_ - shard_->split.first();
  const bool has_padding = padding_idx_ >= 0 && padding >= 0 && padding < weight.size(0);
  const auto found =
      torch::embedding(weight, own.masked_fill(elsewhere, 0), has_padding ? padding : -1)
          .masked_fill(elsewhere.unsqueeze(-1), 0);
  if (options_.sequence_parallel) return reduce_scatter_sequence(found, axis_of(shard_));
  return sum_partial(found, axis(), "tp embedding forward");
}

torch::Tensor VocabParallelEmbeddingImpl::logits(const torch::Tensor& x) {
  if (axis().size() == 1) return F::linear(x, weight);
  const auto axis = axis_of(shard_);
  return F::linear(
      options_.sequence_parallel ? gather_sequence(x, axis, /*sums=*/true) : sum_gradient(x, axis),
      weight);
}

torch::Tensor VocabParallelEmbeddingImpl::whole_weight() const {
  if (axis().size() == 1) return weight.detach();
  return shard_->split.gather(axis(), weight, 0, "tp embedding weight");
}

int64_t VocabParallelEmbeddingImpl::rows() const {
  return shard_->split.features();
}

const Communicator& VocabParallelEmbeddingImpl::axis() const {
  return shard_->comm;
}

void VocabParallelEmbeddingImpl::set_axis(const Communicator& axis) {
  shard_ = on_axis(*shard_, axis);
  note_shard(weight, shard_);
}

torch::Tensor VocabParallelEmbeddingImpl::whole_of(const std::string&) const {
  return whole_weight();
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::VocabParallelEmbedding({} of {}, {})", weight.size(0), rows(),
                        weight.size(1));
}

namespace {

// The losses of all rows, and what their gradients need. With s the logits less the row's maximum,
// Z the sum of exp(s) over all classes and e the smoothing, a row's loss is
// log Z - (1 - e) s[target] - e mean(s).
struct CrossEntropy : Function<CrossEntropy> {
  // logits: [rows, own classes]; targets: [rows]; counts: [rows], whether a target is not ignored.
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& logits,
                               const torch::Tensor& targets, const torch::Tensor& counts,
                               const ShardAxisPtr& shard, double smoothing) {
    const Communicator& axis = shard->comm;
    const auto maximum = std::get<0>(logits.max(1));
    axis.all_reduce(maximum, ReduceOp::kMax, {.label = "tp cross entropy, maximum"});
    auto shifted = logits - maximum.unsqueeze(1);

    auto own = targets - shard->split.first();
    const auto elsewhere = own.lt(0).logical_or(own.ge(logits.size(1))).logical_or(~counts);
    own = own.masked_fill(elsewhere, 0);
    const auto of_target = shifted.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0);
    std::vector<torch::Tensor> parts = {of_target};
    if (smoothing > 0) parts.push_back(shifted.sum(1));
    const auto exponentials = shifted.exp_();  // reuses the memory
    parts.insert(parts.begin(), exponentials.sum(1));
    const auto sums = torch::stack(parts);  // [2 or 3, rows]
    axis.all_reduce(sums, ReduceOp::kSum, {.label = "tp cross entropy, sums"});

    const auto softmax = exponentials.div_(sums[0].unsqueeze(1));
    context->save_for_backward({softmax, own, elsewhere, counts});
    context->saved_data["smoothing"] = smoothing;
    context->saved_data["classes"] = shard->split.features();
    auto loss = sums[0].log() - (1 - smoothing) * sums[1];
    if (smoothing > 0) loss -= smoothing / static_cast<double>(shard->split.features()) * sums[2];
    return loss.masked_fill_(~counts, 0);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (torch::GradMode::is_enabled()) {
      throw Error(Code::kEngine,
                  "vocab_parallel_cross_entropy cannot be differentiated twice (create_graph = "
                  "true)",
                  "use cross_entropy on whole logits for second derivatives");
    }
    const auto saved = context->get_saved_variables();
    const auto smoothing = context->saved_data["smoothing"].toDouble();
    const auto classes = context->saved_data["classes"].toInt();
    const auto weight = gradients[0].masked_fill(~saved[3], 0).unsqueeze(1);  // [rows, 1]
    auto gradient = saved[0] * weight;
    const auto of_target = (weight * -(1 - smoothing)).masked_fill(saved[2].unsqueeze(1), 0);
    gradient.scatter_add_(1, saved[1].unsqueeze(1), of_target);
    if (smoothing > 0) gradient -= weight * (smoothing / static_cast<double>(classes));
    return {gradient, {}, {}, {}, {}};
  }
};

void require_classes(const torch::Tensor& own_logits, const torch::Tensor& targets,
                     const ShardAxis& shard) {
  const int64_t given = own_logits.dim() == 0 ? 0 : own_logits.size(-1);
  auto rows = own_logits.sizes().vec();
  if (!rows.empty()) rows.pop_back();
  if (given == shard.split.own() && targets.sizes() == rows &&
      targets.scalar_type() == torch::kLong) {
    return;
  }
  throw Error(Code::kTensorMismatch,
              fmt::format("vocab_parallel_cross_entropy: rank {} of {} has {} of {} classes, but "
                          "was given logits {} and targets {} of {}",
                          shard.comm.rank(), shard.comm.size(), shard.split.own(),
                          shard.split.features(), shape_text(own_logits.sizes()),
                          shape_text(targets.sizes()), toString(targets.scalar_type())),
              "give the logits of VocabParallelEmbedding as [..., own classes] and int64 targets "
              "as [...]");
}

// An id that no rank has would count as a logit of 0.
void require_targets_in_range(const torch::Tensor& wrong, int64_t classes) {
  if (!wrong.is_cpu() || !wrong.any().item<bool>()) return;
  throw Error(Code::kTensorMismatch,
              fmt::format("vocab_parallel_cross_entropy: a target is neither one of {} classes nor "
                          "ignore_index",
                          classes),
              "give targets from 0 to one less than the classes");
}

}  // namespace

torch::Tensor vocab_parallel_cross_entropy(const torch::Tensor& own_logits,
                                           const torch::Tensor& targets, int64_t classes,
                                           const Communicator& axis,
                                           const F::CrossEntropyFuncOptions& options) {
  if (options.weight().defined()) {
    throw Error(Code::kUsage, "vocab_parallel_cross_entropy does not take class weights",
                "gather the logits and use torch::nn::functional::cross_entropy");
  }
  const auto shard = divide_rows("classes of vocab_parallel_cross_entropy", classes, axis);
  require_classes(own_logits, targets, *shard);
  auto logits = own_logits.reshape({-1, own_logits.size(-1)});
  if (logits.scalar_type() == torch::kHalf || logits.scalar_type() == torch::kBFloat16) {
    logits = logits.to(torch::kFloat);
  }
  const auto flat = targets.reshape({-1});
  if (axis.size() == 1) {
    auto loss = F::cross_entropy(logits, flat, options);
    return loss.dim() == 0 ? loss : loss.view(targets.sizes());
  }
  const auto counts = flat.ne(options.ignore_index());
  const auto wrong = flat.lt(0).logical_or(flat.ge(classes)).logical_and(counts);
  require_targets_in_range(wrong, classes);
  const auto losses = CrossEntropy::apply(logits, flat, counts, shard, options.label_smoothing())
                          .masked_fill(wrong, std::numeric_limits<double>::quiet_NaN());
  switch (torch::enumtype::reduction_get_enum(options.reduction())) {
    case torch::Reduction::None:
      return losses.view(targets.sizes());
    case torch::Reduction::Sum:
      return losses.sum();
    default:
      return losses.sum() / counts.sum();
  }
}

}  // namespace lockstep
