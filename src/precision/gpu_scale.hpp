#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/cuda_stream.hpp"

// The scale on a GPU, and what becomes of it at the end of a step. Of builds with CUDA only.
namespace lockstep {

/// In the GPU's memory.
struct GpuScale {
  float scale;
  int32_t tracker;  ///< finite steps in a row
  int64_t updates;  ///< counts settle(), also where a captured step is replayed
};

/// Skipped updates as a GPU writes them, in memory of the host that it reaches. What is not read
/// before kEntries more were written is lost.
struct SkipRing {
  struct Entry {
    int64_t update;
    int32_t parameter;  ///< id of the first that overflowed
    float scale_before;
    float scale_after;
  };
  static constexpr uint64_t kEntries = 1024;

  void* queued;  ///< CUDA's event of the last settle that was queued, and not captured
  uint64_t written;
  Entry entries[kEntries];  ///< [number of the skipped update % kEntries]
};

/// For settles on the current GPU. Captured ones must be done when the last owner lets go.
std::shared_ptr<SkipRing> make_skip_ring();

/// One optimizer's finding, in the GPU's memory.
struct GpuSettleFinding {
  const float* found_inf = nullptr;
  const int32_t* first = nullptr;
};

struct GpuSettleRules {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  float new_scale = 0;  ///< more than 0: becomes the scale, and the tracker stays
  bool found_on_host = false;
};

/// Moves the scale by PyTorch's rules and counts the update. Where a finding says so, the ring gets
/// an entry; what only the host found is the host's to report.
void gpu_settle(GpuScale* scale, std::span<const GpuSettleFinding> findings,
                const GpuSettleRules& rules, SkipRing* ring, CudaStream stream);

}  // namespace lockstep
