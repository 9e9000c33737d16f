#pragma once

#include <string>

#include "lockstep/lockstep.hpp"
#include "model.hpp"

namespace gpt2 {

/// A folder as Hugging Face's transformers writes it for GPT-2: config.json and model.safetensors.
/// Weights of linear layers are transposed there (Conv1D), and the output layer is the token
/// embedding.
struct PublishedModel {
  Config config;
  lockstep::TensorMap weights;  // whole, under our names
};

/// Names may have the prefix `transformer.`; masks and a tied lm_head are passed over. Weights are
/// converted to float32.
PublishedModel read_published(const std::string& folder);

/// `weights` are whole, under our names.
void write_published(const std::string& folder, const Config& config,
                     const lockstep::TensorMap& weights);

}  // namespace gpt2
