#pragma once

#include <cstdint>

#include "base/cuda_stream.hpp"
#include "lockstep/dtype.hpp"

// Kernels, of builds with CUDA only. Arrays are contiguous, at addresses that divide by 16.
namespace lockstep::layers {

/// What a gradient passes through backwards.
enum class Undone { kNothing, kRelu, kGeluTanh };

/// A gradient before an activation from the one behind it, in place, and its sums over rows, in one
/// pass.
struct UndoActivation {
  Undone what;
  Dtype dtype;       ///< half precision
  int64_t rows;      ///< 1 or more
  int64_t width;     ///< divides by 8
  void* gradient;    ///< [rows, width]
  const void* kept;  ///< [rows, width]: ReLU's output, what GELU got; null for kNothing
  float* partials;   ///< [undo_partials(rows), width]; null: no sums
  void* sums;        ///< [width], of dtype
};
void undo_activation(const UndoActivation& work, CudaStream stream);
int64_t undo_partials(int64_t rows);

/// Squares of x - target: their mean, and the gradient of x for a loss whose gradient is
/// `upstream`.
struct SquaredError {
  Dtype dtype;         ///< of x: half precision
  Dtype target_dtype;  ///< that, or float32
  int64_t count;       ///< divides by 8
  const void* x;
  const void* target;
};
/// partials: [squared_error_partials()] of the current GPU.
void squared_error_forward(const SquaredError& work, double* partials, float* loss,
                           CudaStream stream);
void squared_error_backward(const SquaredError& work, const float* upstream, void* gradient,
                            CudaStream stream);
int64_t squared_error_partials();

}  // namespace lockstep::layers
