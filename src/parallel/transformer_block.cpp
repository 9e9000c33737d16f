#include "lockstep/transformer_block.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include "lockstep/error.hpp"
#include "lockstep/split.hpp"

namespace lockstep {
namespace {

TransformerBlockOptions checked(TransformerBlockOptions options) {
  if (options.mlp_width == 0) options.mlp_width = 4 * options.width;
  if (options.width > 0 && options.heads > 0 && options.width % options.heads == 0 &&
      options.mlp_width > 0) {
    return options;
  }
  throw Error(Code::kUsage,
              fmt::format("a TransformerBlock of width {} cannot have {} heads and an MLP of {}",
                          options.width, options.heads, options.mlp_width),
              "give positive sizes, and a width that is a multiple of the heads");
}

// An undivided layer as its part on this rank. Without one a new Linear is drawn.
template <class Layer, class Options>
Layer own_part(const Layer* whole, int64_t in, int64_t out, const Communicator& axis,
               const Options& options) {
  if (whole == nullptr) return Layer(torch::nn::Linear(in, out), axis, options);
  return Layer((*whole)->weight, (*whole)->bias, axis, options);
}

torch::nn::LayerNorm whole_norm(const ParallelLayerNorm* layer, int64_t width, double eps) {
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({width}).eps(eps));
  if (layer == nullptr) return norm;
  norm->weight = (*layer)->weight;
  norm->bias = (*layer)->bias;
  return norm;
}

int64_t head_width(const TransformerBlockOptions& options) {
  return options.width / options.heads;
}

const TransformerBlockImpl* require_whole(const TransformerBlockImpl& block) {
  if (block.qkv->axis().size() == 1) return &block;
  throw Error(Code::kTensorMismatch,
              fmt::format("a TransformerBlock that is already divided over {} ranks was given to "
                          "be divided",
                          block.qkv->axis().size()),
              "divide a whole block");
}

}  // namespace

TransformerBlockImpl::TransformerBlockImpl(const TransformerBlockOptions& options)
    : TransformerBlockImpl(checked(options), nullptr, Communicator::self(), false) {}

TransformerBlockImpl::TransformerBlockImpl(const TransformerBlockImpl& whole,
                                           const Communicator& axis, bool sequence_parallel)
    : TransformerBlockImpl(whole.options_, require_whole(whole), axis, sequence_parallel) {}

TransformerBlockImpl::TransformerBlockImpl(const TransformerBlockOptions& options,
                                           const TransformerBlockImpl* whole,
                                           const Communicator& axis, bool sequence_parallel)
    : ln1(whole_norm(whole ? &whole->ln1 : nullptr, options.width, options.eps), axis,
          sequence_parallel),
      ln2(whole_norm(whole ? &whole->ln2 : nullptr, options.width, options.eps), axis,
          sequence_parallel),
      qkv(own_part(
          whole ? &whole->qkv : nullptr, options.width, 3 * options.width, axis,
          ColumnLinearOptions{
              .parts = 3, .unit = head_width(options), .sequence_parallel = sequence_parallel})),
      fc(own_part(whole ? &whole->fc : nullptr, options.width, options.mlp_width, axis,
                  ColumnLinearOptions{.sequence_parallel = sequence_parallel})),
      proj(own_part(
          whole ? &whole->proj : nullptr, options.width, options.width, axis,
          RowLinearOptions{.unit = head_width(options), .sequence_parallel = sequence_parallel})),
      out(own_part(whole ? &whole->out : nullptr, options.mlp_width, options.width, axis,
                   RowLinearOptions{.sequence_parallel = sequence_parallel})),
      options_(options),
      sequence_parallel_(sequence_parallel && axis.size() > 1),
      own_heads_(proj->weight.size(1) / head_width(options)),
      first_head_(0),
      drop_(options.dropout, axis, sequence_parallel),
      drop_attention_(options.attention_dropout, axis) {
  const auto heads = tensor_split_rows(options.heads, axis.size());
  for (int rank = 0; rank < axis.rank(); ++rank) first_head_ += heads[static_cast<size_t>(rank)];
  register_module("ln1", ln1);
  register_module("qkv", qkv);
  register_module("proj", proj);
  register_module("ln2", ln2);
  register_module("fc", fc);
  register_module("out", out);
  register_module("drop", drop_);
  register_module("drop_attention", drop_attention_);
}

torch::Tensor TransformerBlockImpl::project_qkv(const torch::Tensor& normed) {
  return qkv->axis().size() == 1 ? linear(normed, qkv->weight, qkv->bias) : qkv(normed);
}

torch::Tensor TransformerBlockImpl::attention(const torch::Tensor& normed) {
  const auto packed = project_qkv(normed);
  if (!is_training() || options_.attention_dropout == 0) {
    return causal_self_attention(packed, own_heads_);
  }
  return causal_self_attention(packed, own_heads_, [this](const torch::Tensor& weights) {
    return drop_attention_->drop_part(weights, 1, first_head_, options_.heads);
  });
}

torch::Tensor TransformerBlockImpl::mlp(const torch::Tensor& normed) {
  if (fc->axis().size() == 1) {
    return multi_layer(normed, {fc->weight, out->weight}, {fc->bias, out->bias},
                       Activation::kGeluTanh);
  }
  return out(at::gelu(fc(normed), "tanh"));
}

std::pair<torch::Tensor, torch::Tensor> TransformerBlockImpl::forward_branch(
    const torch::Tensor& x, const torch::Tensor& branch) {
  const auto [before, normed] = ln1->add(x, branch);
  const auto mixed = attention(normed);
  const auto projected =
      proj->axis().size() == 1 ? linear(mixed, proj->weight, proj->bias) : proj(mixed);
  const auto [between, again] = ln2->add(before, drop_(projected));
  return {between, drop_(mlp(again))};
}

torch::Tensor TransformerBlockImpl::forward(const torch::Tensor& x) {
  const auto [stream, branch] = forward_branch(x, {});
  return stream + branch;
}

torch::Tensor TransformerBlockImpl::decode(const torch::Tensor& x, KeyValueCache& cache) {
  if (sequence_parallel_) {
    throw Error(Code::kUsage, "a TransformerBlock with sequence_parallel cannot decode",
                "divide the block without sequence_parallel");
  }
  const torch::NoGradGuard no_grad;
  const auto mixed = cached_self_attention(project_qkv(ln1(x)), own_heads_, cache);
  const auto [between, again] = ln2->add(x, proj(mixed));
  return between + mlp(again);
}

}  // namespace lockstep
