#pragma once

#include <cstdint>

#include "base/cuda_stream.hpp"
#include "lockstep/dtype.hpp"

// Kernels, of builds with CUDA only. Matrices are [rows, width], contiguous, of `dtype` (half
// precision), at addresses that divide by 16; weight and bias are of dtype or float32.
namespace lockstep::layers {

constexpr int64_t kMaxNormWidth = 8192;  // that divides by 8

struct NormForward {
  Dtype dtype;
  Dtype weight_dtype;
  int64_t rows;
  int64_t width;
  const void* x;
  const void* branch;  ///< null: none
  const void* weight;
  const void* bias;
  float eps;
  void* sum;  ///< x + branch; null where there is no branch
  void* normed;
  float* mean;  ///< [rows]
  float* rstd;  ///< [rows], one over the standard deviation
};
void layer_norm_forward(const NormForward& work, CudaStream stream);

struct NormBackward {
  Dtype dtype;
  Dtype weight_dtype;
  int64_t rows;
  int64_t width;
  const void* sum;
  const void* normed_gradient;
  const void* sum_gradient;  ///< null: none
  const void* weight;
  const float* mean;
  const float* rstd;
  void* x_gradient;

  // Null where the weights are not trained. partials: [2, layer_norm_partials(rows, width), width].
  float* partials;
  void* weight_gradient;
  void* bias_gradient;
};
void layer_norm_backward(const NormBackward& work, CudaStream stream);

/// Rows of partial sums that backward needs memory for, on the current GPU.
int64_t layer_norm_partials(int64_t rows, int64_t width);

}  // namespace lockstep::layers
