#pragma once

#include <torch/torch.h>

#include <bit>
#include <bitset>

namespace lockstep::test {

/// Sixteen choices of features in which any two of them are on and off together in every way: row
/// r has feature f if r and f + 1, as bits, have an odd number of ones in common.
template <size_t kFeatures>
std::bitset<kFeatures> features_of_row(int row) {
  static_assert(kFeatures < 16);
  std::bitset<kFeatures> on;
  for (size_t i = 0; i < kFeatures; ++i) {
    on[i] = std::popcount(static_cast<unsigned>(row) & static_cast<unsigned>(i + 1)) % 2 == 1;
  }
  return on;
}

/// A layer whose weights may have any dtype and any strides; computes in float32.
struct OddLinearImpl : torch::nn::Module {
  OddLinearImpl(int64_t in, int64_t out, bool turned = false)
      : weight(register_parameter("weight",
                                  turned ? torch::zeros({in, out}).t() : torch::zeros({out, in}))),
        bias(register_parameter("bias", torch::zeros({out}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(x, weight.to(torch::kFloat), bias.to(torch::kFloat)).tanh();
  }
  torch::Tensor weight, bias;
};
TORCH_MODULE(OddLinear);

/// A layer that is used twice, around a frozen one. The weight has two names.
struct TwiceImpl : torch::nn::Module {
  explicit TwiceImpl(int64_t width) {
    layer = register_module("layer", OddLinear(width, width, /*turned=*/true));
    frozen = register_module("frozen", OddLinear(width, width));
    tied = register_parameter("tied", layer->weight);
  }
  void freeze() {
    for (auto& each : frozen->parameters()) each.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layer(frozen(layer(x))) + x.matmul(tied.to(torch::kFloat));
  }
  OddLinear layer{nullptr}, frozen{nullptr};
  torch::Tensor tied;
};
TORCH_MODULE(Twice);

/// A float64 parameter, and an empty one.
struct GainImpl : torch::nn::Module {
  explicit GainImpl(int64_t width) {
    gain = register_parameter("gain", torch::zeros({width}, torch::kDouble));
    nothing = register_parameter("nothing", torch::zeros({0, 4}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x * gain.to(torch::kFloat) + nothing.to(torch::kFloat).sum();
  }
  torch::Tensor gain, nothing;
};
TORCH_MODULE(Gain);

}  // namespace lockstep::test
