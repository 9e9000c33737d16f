#pragma once

#include <torch/types.h>

namespace lockstep::layers {

/// Whether cpu_linear() can compute this: float32 on the CPU, a dense weight, and few rows. With
/// more rows, a BLAS is as fast.
bool cpu_linear_fits(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& bias);

/// x · weightᵀ + bias by the kernels of kernels/linear_kernels.hpp, differentiable any number of
/// times. x: [..., in], weight: [out, in], bias: [out] or undefined. The gradient of the weight is
/// written where note_gradient_memory() says.
torch::Tensor cpu_linear(const torch::Tensor& x, const torch::Tensor& weight,
                         const torch::Tensor& bias);

}  // namespace lockstep::layers
