#pragma once

#include <cstdint>

#include "kernels/linear_kernels.hpp"

namespace lockstep {

/// The products of linear_kernels.hpp with bfloat16 factors, whose sums are float32. Weights are
/// bfloat16, or float32 that is rounded on the way, so that no rounded copy of them is needed.
///
/// Values of two neighbours are multiplied and added together: inputs and outputs are packed in
/// pairs. `uint16_t` stands for bfloat16.
struct LinearBf16Kernels {
  static constexpr int64_t kPanelRows = 32;   ///< rows that are packed together
  static constexpr int64_t kInputBlock = 16;  ///< inputs whose gradients are computed together
  static constexpr int64_t kOutputBlock = 8;  ///< outputs whose weights' gradients are, for
  static constexpr int64_t kPairBlock = 32;   ///< ... so many inputs

  /// Packs rows of `width` values in panels of [width / 2][kPanelRows][2], for forward() and
  /// input_gradient(); an odd width and the last panel are filled up with zeros. `packed` is
  /// aligned to 64 bytes and holds packed_size() values.
  void (*pack)(const uint16_t* rows, int64_t count, int64_t width, uint16_t* packed);

  /// Packs rows of `width` values as [width / block][count / 2][block][2], for weight_gradient():
  /// x with blocks of kPairBlock, dy with blocks of kOutputBlock. An odd count and the last block
  /// are filled up with zeros. `packed` is aligned to 64 bytes and holds row_pairs_size() values.
  void (*pack_row_pairs)(const uint16_t* rows, int64_t count, int64_t width, int64_t block,
                         uint16_t* packed);

  /// Computes the outputs from `begin` to `end` of all rows, in bfloat16. `bias` is float32 or
  /// null.
  void (*forward)(const LinearShape& shape, const uint16_t* packed_x, const void* weight,
                  bool weight_is_bf16, const float* bias, uint16_t* y, int64_t begin, int64_t end);

  /// Computes the gradient of the inputs from `begin` to `end` of all rows, in bfloat16. Both are
  /// multiples of kInputBlock, or `end` is the last. `scratch` is aligned to 64 bytes and holds
  /// scratch_size() floats, which calls for other inputs may share.
  void (*input_gradient)(const LinearShape& shape, const uint16_t* packed_dy, const void* weight,
                         bool weight_is_bf16, uint16_t* dx, float* scratch, int64_t begin,
                         int64_t end);

  /// Computes the gradient of the weights of the outputs from `begin` to `end`, in the dtype of the
  /// weights. Both are multiples of kOutputBlock, or `end` is the last.
  void (*weight_gradient)(const LinearShape& shape, const uint16_t* dy_pairs,
                          const uint16_t* x_pairs, void* dweight, bool weight_is_bf16,
                          int64_t begin, int64_t end);

  static int64_t padded_rows(int64_t rows) {
    return (rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  }
  static int64_t padded_inputs(int64_t in) {
    return (in + kInputBlock - 1) / kInputBlock * kInputBlock;
  }
  static int64_t scratch_size(int64_t rows, int64_t in) {
    return padded_rows(rows) * padded_inputs(in);
  }
  static int64_t packed_size(int64_t rows, int64_t width) {
    return padded_rows(rows) * ((width + 1) / 2 * 2);
  }
  static int64_t row_pairs_size(int64_t rows, int64_t width, int64_t block) {
    return (rows + 1) / 2 * 2 * ((width + block - 1) / block * block);
  }
};

/// Returns the kernels; null if this machine has no instructions for bfloat16 (AVX512_BF16).
const LinearBf16Kernels* linear_bf16_kernels();

}  // namespace lockstep
