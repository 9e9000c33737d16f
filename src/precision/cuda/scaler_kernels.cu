#include "precision/scaler_kernels.hpp"

#include <algorithm>

#include "precision/cuda/gpu_lists.cuh"

namespace lockstep {
namespace {

using namespace gpu;

constexpr int kChunk = 8192;  // elements a block reads
constexpr int kUnroll = 4;    // packs in flight
constexpr int kWarps = kThreads / 32;

struct Entry {
  const void* data;
  int64_t count;
  int32_t first_chunk;
  int32_t id;
  uint32_t position;  // among all items of the scan
  Dtype dtype;
  bool aligned;
};

template <int kEntries>
struct Table {
  Entry entries[kEntries];
  int count;
  uint32_t blocks;  // of all launches of this scan
  GpuScanResult* result;
  double* partials;  // of this launch: [block]
  double* all_partials;
};
using SmallTable = Table<100>;
using LargeTable = Table<1000>;
static_assert(sizeof(LargeTable) <= kMostParameterBytes);

__device__ double sum_of_block(double mine) {
  __shared__ double of_warps[kWarps];
  for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_down_sync(0xffffffff, mine, lanes);
  __syncthreads();  // the last call's sums have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  double sum = 0;
  for (const double of_warp : of_warps) sum += of_warp;
  return sum;
}

template <bool kSum>
struct Found {
  bool finite = true;
  double sum = 0;

  template <class T>
  __device__ void take(T element) {
    const auto x = widen(element);
    finite = finite && isfinite(x);
    if constexpr (kSum) sum += static_cast<double>(x) * static_cast<double>(x);
  }
};

template <class T, bool kSum>
__device__ void scan_chunk(const Entry& entry, int64_t begin, Found<kSum>& found) {
  const T* data = static_cast<const T*>(entry.data) + begin;
  const int64_t count = entry.count - begin;
  if (entry.aligned && count >= kChunk) {
    constexpr int kStride = kThreads * kWidth;
    for (int first = 0; first < kChunk; first += kStride * kUnroll) {
      Pack<T> packs[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = first + u * kStride + static_cast<int>(threadIdx.x) * kWidth;
        packs[u] = *reinterpret_cast<const Pack<T>*>(data + at);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) found.take(packs[u].at[e]);
      }
    }
  } else {
    const int end = static_cast<int>(count < kChunk ? count : kChunk);
    for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreads) found.take(data[i]);
  }
}

// Whether this block is the last of all launches; it then sees what all others wrote.
__device__ bool is_last_block(GpuScanResult* result, uint32_t blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&result->arrived, 1U) == blocks - 1;
  }
  __syncthreads();
  return last;
}

template <bool kSum, class SomeTable>
__device__ void write_result(const SomeTable& table) {
  double sum = 0;
  if constexpr (kSum) {
    for (uint32_t i = threadIdx.x; i < table.blocks; i += kThreads) {
      sum += __ldcg(table.all_partials + i);
    }
    sum = sum_of_block(sum);
  }
  if (threadIdx.x != 0) return;
  const unsigned long long best = atomicMax(&table.result->best, 0ULL);
  table.result->sum_of_squares = sum;
  table.result->found_inf = best == 0 ? 0.0F : 1.0F;
  table.result->first = best == 0 ? -1 : static_cast<int32_t>(best & 0xffffffffU);
}

template <bool kSum, class SomeTable>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ SomeTable table) {
  const int block = static_cast<int>(blockIdx.x);
  const Entry& entry = table.entries[entry_of(table, block)];
  const int64_t begin = static_cast<int64_t>(block - entry.first_chunk) * kChunk;
  Found<kSum> found;
  switch (entry.dtype) {
    case Dtype::kF16:
      scan_chunk<__half>(entry, begin, found);
      break;
    case Dtype::kBF16:
      scan_chunk<__nv_bfloat16>(entry, begin, found);
      break;
    case Dtype::kF64:
      scan_chunk<double>(entry, begin, found);
      break;
    default:
      scan_chunk<float>(entry, begin, found);
  }
  const bool bad = __syncthreads_or(found.finite ? 0 : 1) != 0;
  if constexpr (kSum) {
    const double sum = sum_of_block(found.sum);
    if (threadIdx.x == 0) table.partials[block] = sum;
  }
  if (bad && threadIdx.x == 0) {
    // The earlier the item, the larger the key.
    const auto key = static_cast<unsigned long long>(0xffffffffU - entry.position) << 32;
    atomicMax(&table.result->best, key | static_cast<uint32_t>(entry.id));
  }
  if (is_last_block(table.result, table.blocks)) write_result<kSum>(table);
}

int64_t chunks_of(const GpuScanItem& item) {
  return (item.count + kChunk - 1) / kChunk;
}

// Launches the kernel for at most kEntries items at a time.
template <class SomeTable>
void scan_all(std::span<const GpuScanItem> items, GpuScanResult* result, double* partials,
              CudaStream stream) {
  constexpr int kEntries = sizeof(SomeTable::entries) / sizeof(Entry);
  SomeTable table = {};
  table.blocks = static_cast<uint32_t>(gpu_scan_partials(items));
  table.result = result;
  table.partials = partials;
  table.all_partials = partials;
  int32_t chunks = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const GpuScanItem& item = items[i];
    table.entries[table.count++] = {item.data,
                                    item.count,
                                    chunks,
                                    item.id,
                                    static_cast<uint32_t>(i),
                                    item.dtype,
                                    is_aligned(item.data, dtype_bytes(item.dtype))};
    chunks += static_cast<int32_t>(chunks_of(item));
    if (table.count < kEntries && i + 1 < items.size()) continue;
    if (partials != nullptr) {
      scan<true><<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(table);
      table.partials += chunks;
    } else {
      scan<false><<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(table);
    }
    check(cudaGetLastError(), "scan gradients");
    table.count = 0;
    chunks = 0;
  }
}

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
  // Only this kernel writes, one launch at a time.
  volatile uint64_t* written = &ring->written;
  const uint64_t number = *written;
  ring->entries[number % SkipRing::kEntries] = entry;
  __threadfence_system();  // a host that sees the number must see the entry
  *written = number + 1;
}

// One thread is enough for a handful of numbers.
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

int64_t gpu_scan_partials(std::span<const GpuScanItem> items) {
  int64_t chunks = 0;
  for (const GpuScanItem& item : items) chunks += chunks_of(item);
  if (chunks > kMostChunks) {
    throw Error(Code::kUsage, "an optimizer has more gradients than one scan can read",
                "make several optimizers");
  }
  return chunks;
}

void gpu_scan(std::span<const GpuScanItem> items, GpuScanResult* result, double* partials,
              CudaStream stream) {
  check(cudaMemsetAsync(result, 0, sizeof *result, stream), "clear a scan's result");
  if (items.size() <= 100) {
    scan_all<SmallTable>(items, result, partials, stream);
  } else {
    scan_all<LargeTable>(items, result, partials, stream);
  }
}

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
