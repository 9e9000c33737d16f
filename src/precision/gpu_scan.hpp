#pragma once

#include <cstdint>
#include <span>

#include "base/cuda_stream.hpp"
#include "lockstep/dtype.hpp"

// One reading pass over gradients on a GPU. Of builds with CUDA only.
namespace lockstep {

/// A dense gradient: F16, BF16, F32 or F64, one element at least.
struct GpuScanItem {
  const void* data = nullptr;
  int64_t count = 0;
  Dtype dtype = Dtype::kF32;
  int32_t id = 0;  ///< not negative; what the result says of it
};

/// What was found, in the GPU's memory.
struct GpuScanResult {
  double sum_of_squares;    ///< of all elements, in one order; 0 where it was not asked for
  float found_inf;          ///< 1 where an element is infinite or not a number, else 0
  int32_t first;            ///< id of the first item that has such an element; -1: none
  unsigned long long best;  // while scanning: the first so far, 0: none
  uint32_t arrived;         // while scanning: blocks that are done
  uint32_t unused;
};

/// Partial sums that a scan with sums needs room for.
int64_t gpu_scan_partials(std::span<const GpuScanItem> items);

/// `partials`: room on the GPU, or null: no sum is wanted. Items must not be none.
void gpu_scan(std::span<const GpuScanItem> items, GpuScanResult* result, double* partials,
              CudaStream stream);

}  // namespace lockstep
