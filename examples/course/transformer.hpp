#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "course/options.hpp"

namespace course {

/// Positions of the sequence that a row is read as: each is the next dim / 16 values of it.
inline constexpr int64_t kPositions = 16;

/// Width of one attention head; a narrower model has a single head of its own width.
inline constexpr int64_t kHeadWidth = 64;

/// Refuses a --dim, --hidden or --depth that does not fit a transformer, with the nearest that
/// does.
void require_transformer_sizes(const Options& options);

/// Attention heads of a model of that width.
int64_t heads_of(int64_t width);

/// Each position looks at itself and at those before it: from [batch, positions, q k v], each of
/// them `heads` side by side, to [batch, positions, heads side by side].
torch::Tensor causal_attention(const torch::Tensor& qkv, int64_t heads);

/// Causal attention between the two projections that learn.
struct CausalSelfAttentionImpl : torch::nn::Cloneable<CausalSelfAttentionImpl> {
  explicit CausalSelfAttentionImpl(int64_t given_width);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);  // [batch, positions, width], as is the result

  int64_t width;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(CausalSelfAttention);

/// Attention, then an MLP four times as wide; both read a normalised copy and add to the stream.
struct TransformerBlockImpl : torch::nn::Cloneable<TransformerBlockImpl> {
  explicit TransformerBlockImpl(int64_t given_width);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);

  int64_t width;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  CausalSelfAttention attention{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(TransformerBlock);

/// A small GPT-style decoder of width --hidden with --depth blocks. Takes and gives rows of --dim
/// values, as the MLP does, so that the same batches, files and loss serve both. Parameters are
/// named as the same module in PyTorch would name them: positions, blocks.0.attention.qkv.weight, …
struct TransformerImpl : torch::nn::Cloneable<TransformerImpl> {
  explicit TransformerImpl(const Options& given);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);  // [batch, dim], as is the result

  Options options;
  torch::nn::Linear input{nullptr}, output{nullptr};
  torch::Tensor positions;  // [positions, width], learned
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace course
