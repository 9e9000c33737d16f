#pragma once

#include <torch/types.h>

#include <string>

namespace lockstep::layers {

/// `tensor` as Autocast hands it to a matrix product; itself where Autocast is off. Undefined stays
/// undefined.
torch::Tensor autocast(const torch::Tensor& tensor);

/// Whether the tensor is float16 or bfloat16.
bool is_low_precision(const torch::Tensor& tensor);

/// Whether lockstep's kernels can take these together: on one GPU, all float16 or all bfloat16,
/// none without elements. Undefined ones do not matter. False in builds without CUDA.
bool fit_kernels(at::TensorList tensors);

/// Refuses a linear layer that cannot take rows of `width` values, or whose bias does not fit its
/// weight (kTensorMismatch).
void require_linear_shapes(const std::string& who, int64_t width, const torch::Tensor& weight,
                           const torch::Tensor& bias);

/// "[4, 1024]".
std::string shape_text(const torch::Tensor& tensor);

}  // namespace lockstep::layers
