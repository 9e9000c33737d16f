#pragma once

#include <cstdint>
#include <string>

#include "model.hpp"

namespace gpt2 {

struct SampleOptions {
  std::string model;   // folder of a published model with its tokenizer
  std::string tokens;  // folder of the tokenizer; empty: the model's
  std::string prompt;
  int64_t count = 200;       // tokens to add
  double temperature = 0.8;  // 0: the likeliest token
  int64_t top_k = 50;        // 0: all
  uint64_t seed = 0;
};

/// Prints the prompt and what the model goes on with.
int sample(const SampleOptions& options);

/// Writes the logits of a token file's first rows, at most a context, as tensor `logits` of a
/// safetensors file: [positions, vocabulary].
int write_logits(const std::string& model, const std::string& tokens, const std::string& out);

/// One rank's whole model, which decodes with a cache of keys and values.
class Decoder {
 public:
  Decoder(const Config& config, const Weights& weights);

  /// The logits of the token after these, which follow those of earlier calls: [vocabulary]. When
  /// the context is full it forgets the older half.
  torch::Tensor next_logits(const std::vector<int>& tokens);

 private:
  torch::Tensor run(const std::vector<int>& tokens);

  Config config_;
  torch::nn::Sequential net_;
  std::vector<lockstep::KeyValueCache> caches_;  // [block]
  std::vector<int> seen_;
};

}  // namespace gpt2
