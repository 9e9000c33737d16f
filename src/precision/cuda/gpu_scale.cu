#include "precision/gpu_scale.hpp"

#include <algorithm>

#include "precision/cuda/gpu_lists.cuh"

namespace lockstep {
namespace {

using namespace gpu;

constexpr int kMostFindings = 100;

struct SettleTable {
  GpuSettleFinding findings[kMostFindings];
  int count;
  GpuSettleRules rules;
  GpuScale* scale;
  SkipRing* ring;
};
static_assert(sizeof(SettleTable) <= kMostParameterBytes);

__device__ void move_scale(GpuScale& scale, const GpuSettleRules& rules, bool overflowed) {
  const auto value = static_cast<double>(scale.scale);
  if (rules.new_scale > 0) {
    scale.scale = rules.new_scale;
  } else if (overflowed) {
    scale.scale = static_cast<float>(value * rules.backoff_factor);
    scale.tracker = 0;
  } else if (++scale.tracker == rules.growth_interval) {
    const auto grown = static_cast<float>(value * rules.growth_factor);
    if (isfinite(grown)) scale.scale = grown;
    scale.tracker = 0;
  }
}

__device__ void append(SkipRing* ring, const SkipRing::Entry& entry) {
  // Only this kernel writes, one launch after the other.
  volatile uint64_t* written = &ring->written;
  const uint64_t number = *written;
  ring->entries[number % SkipRing::kEntries] = entry;
  __threadfence_system();  // the host finds the entry when it finds the number
  *written = number + 1;
}

// One thread: all of it is a handful of numbers.
__global__ void settle(const __grid_constant__ SettleTable table) {
  int32_t first = -1;
  bool found = false;
  for (int i = 0; i < table.count && !found; ++i) {
    found = *table.findings[i].found_inf != 0;
    if (found) first = *table.findings[i].first;
  }
  GpuScale scale = *table.scale;
  const float before = scale.scale;
  move_scale(scale, table.rules, found || table.rules.found_on_host);
  scale.updates += 1;
  *table.scale = scale;
  if (found) append(table.ring, {scale.updates, first, before, scale.scale});
}

}  // namespace

std::shared_ptr<SkipRing> make_skip_ring() {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(SkipRing), cudaHostAllocPortable | cudaHostAllocMapped),
        "allocate memory that host and GPU share");
  auto* made = static_cast<SkipRing*>(memory);
  *made = {};
  const std::shared_ptr<SkipRing> ring(made, [](SkipRing* mine) {
    if (mine->queued != nullptr) {
      const auto event = static_cast<cudaEvent_t>(mine->queued);
      (void)cudaEventSynchronize(event);  // a settle that writes here may still be queued
      (void)cudaEventDestroy(event);
    }
    (void)cudaFreeHost(mine);
  });
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "make an event");
  ring->queued = event;
  return ring;
}

void gpu_settle(GpuScale* scale, std::span<const GpuSettleFinding> findings,
                const GpuSettleRules& rules, SkipRing* ring, CudaStream stream) {
  if (findings.size() > kMostFindings) {
    throw Error(Code::kUsage, "a GradScaler serves at most 100 optimizers on GPUs between updates",
                "give the others a scaler of their own");
  }
  SettleTable table = {};
  std::copy(findings.begin(), findings.end(), table.findings);
  table.count = static_cast<int>(findings.size());
  table.rules = rules;
  table.scale = scale;
  table.ring = ring;
  settle<<<1, 1, 0, stream>>>(table);
  check(cudaGetLastError(), "settle the scale");
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "tell whether a stream is captured");
  if (status != cudaStreamCaptureStatusNone) return;
  check(cudaEventRecord(static_cast<cudaEvent_t>(ring->queued), stream), "record an event");
}

}  // namespace lockstep
