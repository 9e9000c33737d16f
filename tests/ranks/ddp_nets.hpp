#pragma once

#include <torch/torch.h>

#include <vector>

namespace lockstep::test {

/// Two layers and a batch of rows, the same in every process and thread.
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
    const torch::NoGradGuard no_grad;
    float next = 0.1F;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()).mul(0.37).sin() *
                      next);
      next += 0.1F;
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }

  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};
TORCH_MODULE(TwoLayers);

inline torch::Tensor rows(int64_t count, int64_t width, double phase) {
  return torch::arange(count * width).view({count, width}).mul(0.61).add(phase).cos();
}

/// A batch of one number.
inline torch::Tensor value(double number) {
  return torch::full({1}, static_cast<float>(number));
}

/// One weight per name; forward's arguments decide which are used.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    always = register_parameter("always", torch::ones({1}));
    left = register_parameter("left", torch::ones({1}));
    right = register_parameter("right", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& x, bool use_left, bool use_right) {
    auto out = x * always;
    if (use_left) out = out + x * left;
    if (use_right) out = out + x * right;
    return out;
  }
  torch::Tensor always, left, right;
};
TORCH_MODULE(Branches);

/// One weight: its gradient is the mean of the input.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { weight = register_parameter("weight", torch::ones({1})); }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
  torch::Tensor weight;
};
TORCH_MODULE(Scale);

}  // namespace lockstep::test
