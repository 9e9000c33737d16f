#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "course/options.hpp"

namespace course {

/// A multi-layer perceptron: dim -> hidden, `depth` times hidden -> hidden, hidden -> dim, ReLU
/// between. Its parameters are named as PyTorch's nn.Sequential names them: layers.0.weight,
/// layers.2.weight, …
struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  explicit MlpImpl(const Options& given);
  void reset() override;
  torch::Tensor forward(const torch::Tensor& x);

  Options options;
  torch::nn::Sequential layers{nullptr};
  bool shapes_printed = false;  // each replica prints once
};
TORCH_MODULE(Mlp);

}  // namespace course
