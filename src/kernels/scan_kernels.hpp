#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

/// Gradients are read in blocks of this many elements. A block's sum has one order of additions,
/// and blocks are added in theirs, so that no number of threads and no set of instructions changes
/// a bit.
inline constexpr int64_t kScanBlock = 4096;

/// What is found in at most kScanBlock elements.
struct BlockScan {
  bool finite = true;
  double sum_of_squares = 0;  ///< meaningful where finite
};

BlockScan scan_block(const float* data, int64_t count);
BlockScan scan_block(const double* data, int64_t count);

/// Multiplies in place; false where an element was infinite or not a number before.
bool unscale_block(float* data, int64_t count, float inverse_scale);
bool unscale_block(double* data, int64_t count, double inverse_scale);

/// The same functions for one set of instructions.
struct ScanKernels {
  BlockScan (*scan_f32)(const float* data, int64_t count);
  BlockScan (*scan_f64)(const double* data, int64_t count);
  bool (*unscale_f32)(float* data, int64_t count, float inverse_scale);
  bool (*unscale_f64)(double* data, int64_t count, double inverse_scale);
};

const ScanKernels& plain_scan_kernels();
#ifdef __x86_64__
const ScanKernels& avx2_scan_kernels();
const ScanKernels& avx512_scan_kernels();
#endif

}  // namespace lockstep
