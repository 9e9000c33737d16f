#pragma once

#include <cstdint>

#include "base/cuda_stream.hpp"
#include "base/dtype.hpp"

// The layers' kernels, in builds with CUDA only. Arrays are contiguous and start at multiples of 16
// bytes. `dtype` is F16 or BF16.
namespace lockstep::layers {

/// Which activation a gradient passes through backwards.
enum class Undone { kNothing, kRelu, kGeluTanh };

/// Turns the gradient behind an activation into the one before it, in place, and sums it over rows
/// in the same pass.
struct UndoActivation {
  Undone what;
  Dtype dtype;
  int64_t rows;      ///< 1 or more
  int64_t width;     ///< a multiple of 8
  void* gradient;    ///< [rows, width]
  const void* kept;  ///< [rows, width]: ReLU's output or GELU's input; null for kNothing
  float* partials;   ///< [undo_partials(rows), width]; null: no sums
  void* sums;        ///< [width], of dtype
};
void undo_activation(const UndoActivation& work, CudaStream stream);
int64_t undo_partials(int64_t rows);

constexpr int64_t kMaxNormWidth = 8192;

/// Matrices are [rows, width] of `dtype`, and the width is a multiple of 8. Weight and bias are of
/// `dtype` or float32.
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
  void* sum;  ///< x + branch; null if there is no branch
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

  // Null if the weights are not trained. partials: [2, layer_norm_partials(rows, width), width].
  float* partials;
  void* weight_gradient;
  void* bias_gradient;
};
void layer_norm_backward(const NormBackward& work, CudaStream stream);

/// How many rows of partial sums backward needs memory for on the current GPU.
int64_t layer_norm_partials(int64_t rows, int64_t width);

/// The mean of the squares of x - target, and the gradient of x for a loss whose gradient is
/// `upstream`.
struct SquaredError {
  Dtype dtype;         ///< of x
  Dtype target_dtype;  ///< the same, or float32
  int64_t count;       ///< a multiple of 8
  const void* x;
  const void* target;
};
/// partials: [squared_error_partials()] of the current GPU.
void squared_error_forward(const SquaredError& work, double* partials, float* loss,
                           CudaStream stream);
void squared_error_backward(const SquaredError& work, const float* upstream, void* gradient,
                            CudaStream stream);
int64_t squared_error_partials();

/// Gradients of logits are stored times this power of two, so that float16 does not lose those of
/// improbable classes.
constexpr float kLogitGradientScale = 1024;

struct CrossEntropy {
  Dtype dtype;
  void* logits;  ///< [rows, classes]; with_gradient: replaced by d(loss of the row) / d(logits)
  int64_t rows;
  int64_t classes;  ///< a multiple of 8
  int64_t valid_classes;
  const int64_t* targets;  ///< [rows]
  float* losses;           ///< [rows]
  bool with_gradient;
};

/// Computes the losses of rows and, in place, their gradients times kLogitGradientScale; those of
/// invalid classes are 0. A target that is not a valid class makes its loss and gradients NaN.
void cross_entropy(const CrossEntropy& work, CudaStream stream);

/// out = in · factor · constant, rounded once. `in` is of dtype or float32, `out` of dtype.
struct ScaleInto {
  Dtype dtype;
  Dtype in_dtype;
  const void* in;
  void* out;
  int64_t count;
  const float* factor;  ///< one value on the GPU
  float constant;
};
void scale_into(const ScaleInto& work, CudaStream stream);

}  // namespace lockstep::layers
