#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/lockstep.hpp"

namespace gpt2 {

/// The sizes of a GPT-2.
struct Config {
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t width = 768;
  int64_t context = 1024;
  int64_t vocabulary = 50257;
  double dropout = 0;  // of embeddings, residuals and attention's weights

  bool operator==(const Config&) const = default;
  int64_t parameters() const;
};

/// The sizes of gpt2, gpt2-medium, gpt2-large or gpt2-xl.
Config named_config(const std::string& name);

/// Where the ranks of one model stand, and whether they divide sequences.
struct Division {
  lockstep::Communicator axis = lockstep::Communicator::self();  // tensor parallel
  bool sequence_parallel = false;
};

/// Token and position embeddings: int64 [rows, positions] -> the stream, [rows, positions, width],
/// or this rank's slice of it.
struct InputImpl : torch::nn::Module {
  InputImpl(const torch::nn::Embedding& whole, const torch::Tensor& positions, double dropout,
            const Division& division);
  torch::Tensor forward(const torch::Tensor& tokens);

  /// Of tokens that stand at `first` and after it; without dropout, whole.
  torch::Tensor embed_at(const torch::Tensor& tokens, int64_t first);

  lockstep::VocabParallelEmbedding wte;
  torch::Tensor wpe;  // [context, width]
  lockstep::ParallelDropout drop;
  Division division;
};
TORCH_MODULE(Input);

/// The last norm and the output layer, whose weight is the token embedding's: the stream -> the
/// logits of this rank's part of the vocabulary.
struct OutputImpl : torch::nn::Module {
  /// `owns`: this stage has a copy of the embedding; otherwise its owner registers it.
  OutputImpl(const torch::nn::LayerNorm& whole, const lockstep::VocabParallelEmbedding& embedding,
             bool owns, const Division& division);
  torch::Tensor forward(const torch::Tensor& x);

  lockstep::ParallelLayerNorm ln_f;
  lockstep::VocabParallelEmbedding wte;
};
TORCH_MODULE(Output);

/// The whole weights of a model, by the names of its layers: from a file, or drawn as GPT-2's were.
/// Every weight has random numbers of its own, so that any rank can make any layer.
class Weights {
 public:
  explicit Weights(uint64_t seed) : seed_(seed) {}
  explicit Weights(lockstep::TensorMap given) : given_(std::move(given)) {}

  /// Sets the parameters of a whole layer. `layers` scales what is added to the stream.
  void fill(torch::nn::Module& layer, const std::string& prefix, int64_t layers) const;

 private:
  uint64_t seed_ = 0;
  lockstep::TensorMap given_;
};

/// The model in stages: "input", the blocks "0", "1", …, and "output" are the layers that
/// `layers_per_stage` counts. Stages that `own` does not name are undefined. With several stages
/// the last one has a copy of the token embedding.
std::vector<torch::nn::Sequential> make_stages(const Config& config, const Weights& weights,
                                               const Division& division,
                                               std::span<const int64_t> layers_per_stage,
                                               std::span<const int> own);

/// The mean cross entropy of logits that are divided as the model's are.
torch::Tensor loss_of(const torch::Tensor& own_logits, const torch::Tensor& targets,
                      const Config& config, const Division& division);

}  // namespace gpt2
