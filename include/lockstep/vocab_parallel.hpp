#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "lockstep/communicator.hpp"
#include "lockstep/tensor_parallel.hpp"

namespace lockstep {

/// How a VocabParallelEmbedding returns rows and takes inputs.
struct VocabParallelOptions {
  bool sequence_parallel = false;  ///< outputs of forward and inputs of logits() are slices
};

/// An Embedding whose rows are divided over the ranks of an axis, and the output layer that shares
/// its weight. Rows that do not divide evenly are divided by torch.tensor_split's rule. With one
/// rank it is a plain Embedding.
///
///     lockstep::VocabParallelEmbedding wte(torch::nn::Embedding(50257, 768), mesh.axis("tp"));
///     auto x = wte(tokens);                                  // whole on every rank
///     auto loss = lockstep::vocab_parallel_cross_entropy(wte->logits(x), targets, 50257,
///                                                        mesh.axis("tp"));
class VocabParallelEmbeddingImpl : public torch::nn::Module, public OnTensorAxis {
 public:
  /// Copies this rank's rows of the weight, which must be the same on all ranks.
  VocabParallelEmbeddingImpl(const torch::nn::Embedding& whole, const Communicator& axis,
                             const VocabParallelOptions& options = {});
  ~VocabParallelEmbeddingImpl() override;

  /// The rows of these ids, which are the same on all ranks: [...] -> [..., width]. Each rank looks
  /// up its own, and the results are summed; with sequence_parallel they are reduce-scattered.
  torch::Tensor forward(const torch::Tensor& ids);

  /// x · weightᵀ, of this rank's rows only: [..., width] -> [..., own rows].
  torch::Tensor logits(const torch::Tensor& x);

  torch::Tensor whole_weight() const;  ///< without history, on every rank; collective
  int64_t rows() const;                ///< of the whole

  const Communicator& axis() const override;
  void set_axis(const Communicator& axis) override;
  torch::Tensor whole_of(const std::string& parameter) const override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor weight;  // [own rows, width]

 private:
  int64_t padding_idx_;  // of the whole; -1: none
  VocabParallelOptions options_;
  std::shared_ptr<const ShardAxis> shard_;
};

/// Holder of a VocabParallelEmbeddingImpl.
class VocabParallelEmbedding : public torch::nn::ModuleHolder<VocabParallelEmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<VocabParallelEmbeddingImpl>::ModuleHolder;
  VocabParallelEmbedding(const torch::nn::Embedding& whole, const Communicator& axis,
                         const VocabParallelOptions& options)
      : ModuleHolder(std::make_shared<VocabParallelEmbeddingImpl>(whole, axis, options)) {}
};

/// torch::nn::functional::cross_entropy of logits whose classes are divided over the axis as
/// VocabParallelEmbedding divides its rows. The logits are never gathered: the ranks exchange each
/// row's maximum, and then the sum of its exponentials and the target's logit.
///
/// own_logits: [..., own classes]; targets: int64 [...], the same on all ranks; classes: of all
/// ranks. Low precision is computed in float32. Every rank gets the same bits. Options: reduction,
/// ignore_index and label_smoothing; class weights are refused.
torch::Tensor vocab_parallel_cross_entropy(
    const torch::Tensor& own_logits, const torch::Tensor& targets, int64_t classes,
    const Communicator& axis, const torch::nn::functional::CrossEntropyFuncOptions& options = {});

}  // namespace lockstep
