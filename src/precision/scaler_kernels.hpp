#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/cuda_stream.hpp"
#include "base/dtype.hpp"

// A GradScaler's kernels, in builds with CUDA only: one reads gradients, one updates the scale.
namespace lockstep {

/// A dense gradient: F16, BF16, F32 or F64, with at least one element.
struct GpuScanItem {
  const void* data = nullptr;
  int64_t count = 0;
  Dtype dtype = Dtype::kF32;
  int32_t id = 0;  ///< not negative; identifies the gradient in the result
};

/// What a scan found, in the GPU's memory.
struct GpuScanResult {
  double sum_of_squares;    ///< of all elements, in a fixed order; 0 without `partials`
  float found_inf;          ///< 1 if an element is infinite or NaN, else 0
  int32_t first;            ///< id of the first item with such an element; -1: none
  unsigned long long best;  // during the scan: the first so far, 0: none
  uint32_t arrived;         // during the scan: blocks that are done
  uint32_t unused;
};

/// Returns how many partial sums a scan with sums needs memory for.
int64_t gpu_scan_partials(std::span<const GpuScanItem> items);

/// Reads all items once. `partials`: memory on the GPU; null: no sum is wanted. There must be at
/// least one item.
void gpu_scan(std::span<const GpuScanItem> items, GpuScanResult* result, double* partials,
              CudaStream stream);

/// The scale in the GPU's memory.
struct GpuScale {
  float scale;
  int32_t tracker;  ///< finite steps in a row
  int64_t updates;  ///< calls of gpu_settle, replays of captured ones included
};

/// Skipped updates, which a GPU writes to the host's memory. An entry is lost unless it is read
/// before kEntries more are written.
struct SkipRing {
  struct Entry {
    int64_t update;
    int32_t parameter;  ///< id of the first that overflowed
    float scale_before;
    float scale_after;
  };
  static constexpr uint64_t kEntries = 1024;

  void* queued;  ///< CUDA event of the last settle that was queued and not captured
  uint64_t written;
  Entry entries[kEntries];  ///< [number of the skipped update % kEntries]
};

/// Makes a ring for settles on the current GPU. Captured ones must be done when the last owner
/// releases it.
std::shared_ptr<SkipRing> make_skip_ring();

/// What was found in one optimizer's gradients, in the GPU's memory.
struct GpuSettleFinding {
  const float* found_inf = nullptr;
  const int32_t* first = nullptr;
};

struct GpuSettleRules {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  float new_scale = 0;  ///< if positive, becomes the scale; the tracker stays
  bool found_on_host = false;
};

/// Updates the scale by PyTorch's rules and counts the update. If a finding is an overflow, the
/// ring gets an entry; the host reports those that only it has found.
void gpu_settle(GpuScale* scale, std::span<const GpuSettleFinding> findings,
                const GpuSettleRules& rules, SkipRing* ring, CudaStream stream);

}  // namespace lockstep
