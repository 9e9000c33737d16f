#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "course/options.hpp"

namespace course {

/// The layers and widths of --model, for people.
std::string describe_model(const Options& options);

/// A multi-layer perceptron: dim -> hidden, `depth` times hidden -> hidden, hidden -> dim, with
/// ReLU between them. Parameters have the names of PyTorch's nn.Sequential: layers.0.weight,
/// layers.2.weight, …
struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  explicit MlpImpl(const Options& given);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);

  Options options;
  torch::nn::Sequential layers{nullptr};
  bool shapes_noted = false;  // each replica notes and prints what it sees once
};
TORCH_MODULE(Mlp);

/// A row is read as a sequence of so many positions; each has dim / 16 values of the row.
inline constexpr int64_t kPositions = 16;

/// Width of one attention head; a narrower model has a single head of its own width.
inline constexpr int64_t kHeadWidth = 64;

/// Refuses a --dim, --hidden or --depth that does not fit a transformer, and names the nearest that
/// does.
void require_transformer_sizes(const Options& options);

/// The number of attention heads of a model of that width.
int64_t heads_of(int64_t width);

/// Each position attends to itself and to those before it. `qkv` is [batch, positions, q k v], each
/// with its heads side by side; the result is [batch, positions, heads side by side].
torch::Tensor causal_attention(const torch::Tensor& qkv, int64_t heads);

/// Causal attention between two learned projections.
struct CausalSelfAttentionImpl : torch::nn::Cloneable<CausalSelfAttentionImpl> {
  explicit CausalSelfAttentionImpl(int64_t given_width);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);  // [batch, positions, width], as is the result

  int64_t width;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(CausalSelfAttention);

/// Attention, then an MLP four times as wide. Both read a normalised copy of the stream and add to
/// it.
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

/// A small GPT-style decoder of width --hidden with --depth blocks. Like the MLP it maps rows of
/// --dim values to rows of --dim values, so that the same batches, files and loss serve both. The
/// same module in PyTorch would name its parameters alike: positions,
/// blocks.0.attention.qkv.weight, …
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

/// The net that --model names. It adopts the parts of that net, so that parameters keep their
/// names.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Options& options);
  torch::Tensor forward(const torch::Tensor& x) { return forward_(x); }

 private:
  // A base class with a virtual forward would be simpler, but torch::nn::Cloneable derives from
  // Module virtually in libtorch 1.13 and not in 2.x, so no common base class fits both.
  template <class Net>
  void adopt(const std::shared_ptr<Net>& net);

  std::function<torch::Tensor(const torch::Tensor&)> forward_;
};
TORCH_MODULE(Model);

}  // namespace course
