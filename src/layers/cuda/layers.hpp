#pragma once

#include <torch/types.h>

#include <tuple>
#include <vector>

#include "lockstep/fused_layers.hpp"

// The layers on a GPU, for tensors that fit_kernels() accepts. Only in builds with CUDA.
namespace lockstep::layers {

/// A chain of layers: `between` follows all but the last, `after` the last. x: [rows, in].
torch::Tensor cuda_linear_chain(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                                const std::vector<torch::Tensor>& biases, Activation between,
                                Activation after);

/// Whether the kernels can do this: weight and bias both of x's dtype or both float32, a width that
/// divides by 8 and is not beyond 8192, addresses that divide by 16.
bool cuda_layer_norm_fits(const torch::Tensor& x, const torch::Tensor& branch,
                          const torch::Tensor& weight, const torch::Tensor& bias);
std::tuple<torch::Tensor, torch::Tensor> cuda_add_layer_norm(const torch::Tensor& x,
                                                             const torch::Tensor& branch,
                                                             const torch::Tensor& weight,
                                                             const torch::Tensor& bias, double eps);

/// cuDNN's attention where it can, else what libtorch chooses. q, k, v are views of qkv.
torch::Tensor cuda_causal_self_attention(const torch::Tensor& qkv, int64_t heads);

/// Whether the kernels can do this: a number of values that divides by 8, addresses that divide by
/// 16, a target of x's dtype or float32 that needs no gradient.
bool cuda_squared_error_fits(const torch::Tensor& x, const torch::Tensor& target);
torch::Tensor cuda_mean_squared_error(const torch::Tensor& x, const torch::Tensor& target);

/// Whether the kernels can do this: classes that divide by 8.
bool cuda_cross_entropy_fits(const torch::Tensor& weight);
torch::Tensor cuda_linear_cross_entropy(const torch::Tensor& x, const torch::Tensor& weight,
                                        const torch::Tensor& targets, int64_t valid_classes);

}  // namespace lockstep::layers
