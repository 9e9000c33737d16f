#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

/// Gradients are scanned in blocks of this many elements. The additions within a block and the
/// additions of blocks have a fixed order, so that neither the number of threads nor the set of
/// instructions changes a bit.
inline constexpr int64_t kScanBlock = 4096;

/// The result of scanning at most kScanBlock elements.
struct BlockScan {
  bool finite = true;
  double sum_of_squares = 0;  ///< valid if `finite`
};

BlockScan scan_block(const float* data, int64_t count);
BlockScan scan_block(const double* data, int64_t count);

/// Multiplies in place. Returns false if an element was infinite or NaN before.
bool unscale_block(float* data, int64_t count, float inverse_scale);
bool unscale_block(double* data, int64_t count, double inverse_scale);

/// These functions for one set of instructions.
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
