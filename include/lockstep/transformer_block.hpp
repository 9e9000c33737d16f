#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>

#include "lockstep/communicator.hpp"
#include "lockstep/fused_layers.hpp"
#include "lockstep/sequence_parallel.hpp"
#include "lockstep/tensor_parallel.hpp"

namespace lockstep {

/// The sizes of a TransformerBlock and its dropout.
struct TransformerBlockOptions {
  int64_t width = 0;
  int64_t heads = 0;
  int64_t mlp_width = 0;         ///< 0: four times the width
  double dropout = 0;            ///< of what is added to the stream
  double attention_dropout = 0;  ///< of the attention's weights
  double eps = 1e-5;             ///< of both norms
};

/// A causal transformer block as GPT-2's: attention with fused q, k, v, then an MLP with GELU
/// (tanh). Both read a normalised copy of the stream and add to it.
///
///     lockstep::TransformerBlock whole(TransformerBlockOptions{.width = 768, .heads = 12});
///     lockstep::TransformerBlock block(whole, mesh.axis("tp"), /*sequence_parallel=*/true);
///     x = block(x);                                       // [batch, positions, width]
///
/// Over several ranks heads and the MLP's features are divided; heads that do not divide evenly are
/// divided by torch.tensor_split's rule. The stream is whole and the same on all ranks, or with
/// sequence_parallel this rank's slice. Numbers are those of the whole block within rounding, and
/// dropout's masks are the same on the CPU (see ParallelDropout).
class TransformerBlockImpl : public torch::nn::Module {
 public:
  /// A whole block with libtorch's initial weights.
  explicit TransformerBlockImpl(const TransformerBlockOptions& options);

  /// This rank's part of a whole block, whose weights must be the same on all ranks. They are
  /// copied.
  TransformerBlockImpl(const TransformerBlockImpl& whole, const Communicator& axis,
                       bool sequence_parallel = false);

  torch::Tensor forward(const torch::Tensor& x);

  /// {stream, branch} of the block before -> those of this one; the stream that a block means is
  /// their sum, which the next norm computes in the same pass. The first branch is undefined.
  std::pair<torch::Tensor, torch::Tensor> forward_branch(const torch::Tensor& x,
                                                         const torch::Tensor& branch);

  /// Decodes positions that follow those in the cache. Not with sequence_parallel.
  torch::Tensor decode(const torch::Tensor& x, KeyValueCache& cache);

  const TransformerBlockOptions& options() const { return options_; }
  int64_t own_heads() const { return own_heads_; }

  ParallelLayerNorm ln1, ln2;
  ColumnLinear qkv, fc;
  RowLinear proj, out;

 private:
  TransformerBlockImpl(const TransformerBlockOptions& options, const TransformerBlockImpl* whole,
                       const Communicator& axis, bool sequence_parallel);
  torch::Tensor project_qkv(const torch::Tensor& normed);
  torch::Tensor attention(const torch::Tensor& normed);
  torch::Tensor mlp(const torch::Tensor& normed);

  TransformerBlockOptions options_;
  bool sequence_parallel_;
  int64_t own_heads_;
  int64_t first_head_;
  ParallelDropout drop_, drop_attention_;
};

/// Holder of a TransformerBlockImpl.
class TransformerBlock : public torch::nn::ModuleHolder<TransformerBlockImpl> {
 public:
  TransformerBlock(std::nullptr_t) : ModuleHolder(nullptr) {}
  explicit TransformerBlock(std::shared_ptr<TransformerBlockImpl> block)
      : ModuleHolder(std::move(block)) {}
  explicit TransformerBlock(const TransformerBlockOptions& options)
      : ModuleHolder(std::make_shared<TransformerBlockImpl>(options)) {}
  TransformerBlock(const TransformerBlock& whole, const Communicator& axis,
                   bool sequence_parallel = false)
      : ModuleHolder(std::make_shared<TransformerBlockImpl>(*whole, axis, sequence_parallel)) {}
};

}  // namespace lockstep
