#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "course/transformer.hpp"
#include "lockstep/tensor_parallel.hpp"

namespace course {

/// A parameter of the whole model and, where a layer trains parts of it, how to put them together.
struct Trained {
  torch::Tensor whole;
  std::function<torch::Tensor()> gather = {};  ///< collective; none: it is itself trained
};

/// All parameters of a module of the whole model, trained in place.
std::vector<Trained> trained_in_place(const torch::nn::Module& module);

/// Those of a Linear that `divided`, a ColumnLinear or RowLinear, trains in its stead.
template <class Divided>
std::vector<Trained> trained_in_parts(const torch::nn::Linear& whole, const Divided& divided) {
  std::vector<Trained> trained = {{whole->weight, [divided] { return divided->whole_weight(); }}};
  if (whole->bias.defined()) {
    trained.push_back({whole->bias, [divided] { return divided->whole_bias(); }});
  }
  return trained;
}

/// Linear, activation, Linear, with the features between them divided over the ranks.
struct DividedPairImpl : torch::nn::Module {
  DividedPairImpl(const torch::nn::Linear& whole_up, torch::nn::AnyModule given_activation,
                  const torch::nn::Linear& whole_down, const lockstep::Communicator& axis);
  torch::Tensor forward(const torch::Tensor& x);

  lockstep::ColumnLinear up;
  torch::nn::AnyModule activation;
  lockstep::RowLinear down;
  std::vector<Trained> trained;
};
TORCH_MODULE(DividedPair);

/// A TransformerBlock with its heads and the features of its MLP divided over the ranks. The norms
/// are the whole block's own: their gradients are the same on all ranks.
struct DividedBlockImpl : torch::nn::Module {
  DividedBlockImpl(const TransformerBlockImpl& whole, const lockstep::Communicator& axis);
  torch::Tensor forward(const torch::Tensor& x);

  int64_t own_heads;
  torch::nn::LayerNorm norm1, norm2;
  lockstep::ColumnLinear qkv;
  lockstep::RowLinear out;
  DividedPair mlp;
  std::vector<Trained> trained;
};
TORCH_MODULE(DividedBlock);

}  // namespace course
