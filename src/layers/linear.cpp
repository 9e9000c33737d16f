#include <fmt/format.h>
#include <torch/torch.h>

#include "layers/layer_inputs.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"
#if LOCKSTEP_CUDA
#include "layers/cuda/layers.hpp"
#endif

namespace lockstep {
namespace {

torch::Tensor activate(const torch::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kNone:
      break;
  }
  return x;
}

int64_t width_of(const torch::Tensor& x) {
  return x.dim() < 1 ? 0 : x.size(-1);
}

torch::Tensor chain(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                    const std::vector<torch::Tensor>& biases, Activation between,
                    Activation after) {
#if LOCKSTEP_CUDA
  std::vector<torch::Tensor> cast = {layers::autocast(x)};
  for (const auto& weight : weights) cast.push_back(layers::autocast(weight));
  for (const auto& bias : biases) cast.push_back(layers::autocast(bias));
  if (layers::fit_kernels(cast)) {
    const auto first_weight = cast.begin() + 1;
    const auto first_bias = first_weight + static_cast<std::ptrdiff_t>(weights.size());
    const std::vector<torch::Tensor> cast_weights(first_weight, first_bias);
    const std::vector<torch::Tensor> cast_biases(first_bias, cast.end());
    const auto rows = x.dim() == 2 ? cast[0] : cast[0].reshape({-1, x.size(-1)});
    const auto out = layers::cuda_linear_chain(rows, cast_weights, cast_biases, between, after);
    if (x.dim() == 2) return out;
    auto sizes = x.sizes().vec();
    sizes.back() = out.size(1);
    return out.view(sizes);
  }
#endif
  torch::Tensor out = x;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool last = i + 1 == weights.size();
    out = activate(torch::linear(out, weights[i], biases[i]), last ? after : between);
  }
  return out;
}

}  // namespace

torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     Activation activation) {
  layers::require_linear_shapes("linear", width_of(x), weight, bias);
  return chain(x, {weight}, {bias}, Activation::kNone, activation);
}

torch::Tensor multi_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                          const std::vector<torch::Tensor>& biases, Activation between) {
  if (weights.empty() || weights.size() != biases.size()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("multi_layer: {} weights and {} biases", weights.size(), biases.size()),
                "pass one bias a weight, an undefined tensor where a layer has none");
  }
  int64_t width = width_of(x);
  for (size_t i = 0; i < weights.size(); ++i) {
    layers::require_linear_shapes(fmt::format("multi_layer, layer {}", i), width, weights[i],
                                  biases[i]);
    width = weights[i].size(0);
  }
  return chain(x, weights, biases, between, Activation::kNone);
}

#if !LOCKSTEP_CUDA
void tune_layers(bool) {}  // there is nothing to choose from
#endif

}  // namespace lockstep
