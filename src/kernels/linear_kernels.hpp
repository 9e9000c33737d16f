#pragma once

#include <cstdint>

namespace lockstep {

/// The products of a linear layer, y = x · weightᵀ + bias, for few rows. A BLAS packs the weight
/// before it multiplies, which takes as long as the multiplication if there are only 32 rows; these
/// read each weight once, where it is, and pack the rows instead.
///
/// Matrices are dense, row-major and float32: x is [rows, in], weight [out, in], y [rows, out].
/// Every element is one chain of fused multiply-adds in the order of the index that is summed over.
/// So its bits depend neither on the number of rows, nor on how the work is divided, nor on the
/// instructions in use.
struct LinearShape {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
};

/// The kernels for one set of instructions.
struct LinearKernels {
  int64_t panel_rows;  ///< rows that are packed together

  /// Packs rows of `width` values for the products below: panels of [width][panel_rows], the last
  /// one padded with zeros. `packed` is aligned to 64 bytes and holds packed_size() floats.
  void (*pack)(const float* rows, int64_t count, int64_t width, float* packed);

  /// Computes the outputs from `begin` to `end` of all rows. `bias` may be null.
  void (*forward)(const LinearShape& shape, const float* packed_x, const float* weight,
                  const float* bias, float* y, int64_t begin, int64_t end);

  /// Computes the gradient of the inputs from `begin` to `end` of all rows, from that of y.
  /// `scratch` is aligned to 64 bytes and holds packed_size(rows, in) floats, which calls for other
  /// inputs may share.
  void (*input_gradient)(const LinearShape& shape, const float* packed_dy, const float* weight,
                         float* dx, float* scratch, int64_t begin, int64_t end);

  /// Computes the gradient of the weights of the outputs from `begin` to `end`.
  void (*weight_gradient)(const LinearShape& shape, const float* dy, const float* x, float* dweight,
                          int64_t begin, int64_t end);

  int64_t packed_size(int64_t rows, int64_t width) const {
    return (rows + panel_rows - 1) / panel_rows * panel_rows * width;
  }
};

#ifdef __x86_64__
const LinearKernels& avx2_linear_kernels();
const LinearKernels& avx512_linear_kernels();
#endif

/// Returns the kernels for this machine; null if it has none of the instruction sets.
const LinearKernels* linear_kernels();

}  // namespace lockstep
