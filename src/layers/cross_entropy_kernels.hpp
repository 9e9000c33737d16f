#pragma once

#include <cstdint>

#include "base/cuda_stream.hpp"
#include "lockstep/dtype.hpp"

// Kernels, of builds with CUDA only.
namespace lockstep::layers {

/// Gradients of logits are stored times this, a power of two, so that those of improbable classes
/// are not lost in float16.
constexpr float kLogitGradientScale = 1024;

struct CrossEntropy {
  Dtype dtype;   ///< half precision
  void* logits;  ///< [rows, classes]; with_gradient: replaced by d(loss of the row) / d(logits)
  int64_t rows;
  int64_t classes;  ///< divides by 8
  int64_t valid_classes;
  const int64_t* targets;  ///< [rows]
  float* losses;           ///< [rows]
  bool with_gradient;
};

/// Losses of rows and, in place, their gradients times kLogitGradientScale; 0 for classes that are
/// not valid. A target that is not a valid class makes its loss and gradients not a number.
void cross_entropy(const CrossEntropy& work, CudaStream stream);

/// out = in · factor · constant, rounded once. `in` is of dtype or float32, `out` of dtype; both at
/// addresses that divide by 16.
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
