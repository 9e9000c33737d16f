#pragma once

#include <torch/types.h>

namespace lockstep::layers {

/// Whether cpu_linear() can compute this: x, weight and bias are float32, dense and on the CPU, or
/// x is bfloat16 and the others are either, and there are few rows. With more rows, a BLAS is as
/// fast.
bool cpu_linear_fits(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& bias);

/// x · weightᵀ + bias by the kernels of kernels/linear_kernels.hpp, in x's dtype, differentiable
/// any number of times. x: [..., in], weight: [out, in], bias: [out] or undefined. The gradient of
/// the weight has the weight's dtype and is written where note_gradient_memory() says.
torch::Tensor cpu_linear(const torch::Tensor& x, const torch::Tensor& weight,
                         const torch::Tensor& bias);

}  // namespace lockstep::layers
