#pragma once

// The update kernel and its launches, for gpu_update_sgd.cu and gpu_update_adam.cu.

#include <vector>

#include "optim/cuda/gpu_numbers.cuh"
#include "optim/gpu_update.hpp"
#include "precision/cuda/gpu_lists.cuh"

namespace lockstep::gpu {

constexpr int kUpdateChunk = 4096;  // elements a block updates

struct UpdateEntry {
  void* weight;
  void* gradient;
  void* momentum;
  void* variance;
  void* low;
  const UpdateSlot* slot;
  int64_t count;
  int32_t first_chunk;
  bool aligned;
};

template <int kEntries>
struct UpdateTable {
  UpdateEntry entries[kEntries];
  int count;
  bool store_gradients;
};
using SmallUpdateTable = UpdateTable<60>;
using LargeUpdateTable = UpdateTable<500>;
static_assert(sizeof(LargeUpdateTable) <= kMostParameterBytes);

/// The arrays of a chunk. W: weight and state; G: gradient and low-precision copy.
template <class W, class G>
struct UpdateArrays {
  __device__ UpdateArrays(const UpdateEntry& entry, int64_t begin)
      : weight(static_cast<W*>(entry.weight) + begin),
        momentum(static_cast<W*>(entry.momentum) + begin),
        variance(static_cast<W*>(entry.variance) + begin),
        gradient(static_cast<G*>(entry.gradient) + begin),
        low(static_cast<G*>(entry.low) + begin) {}
  W* weight;
  W* momentum;
  W* variance;
  G* gradient;
  G* low;
};

/// kCount elements of each array, in registers.
template <class W, class G, class Update, int kCount>
struct UpdateBatch {
  using Arrays = UpdateArrays<W, G>;
  using Packed = std::conditional_t<kCount == kWidth, Pack<W>, W>;
  using PackedG = std::conditional_t<kCount == kWidth, Pack<G>, G>;

  __device__ void load(const Arrays& from, int at) {
    copy<Packed>(weight, from.weight + at);
    copy<PackedG>(gradient, from.gradient + at);
    if constexpr (Update::kMomentum) copy<Packed>(momentum, from.momentum + at);
    if constexpr (Update::kVariance) copy<Packed>(variance, from.variance + at);
  }

  __device__ void apply(const typename Update::template Numbers<Wide<W>>& numbers) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Element<Wide<W>> element = {};
      element.weight = widen(weight[i]);
      element.gradient = widen(gradient[i]);
      if constexpr (Update::kMomentum) element.momentum = widen(momentum[i]);
      if constexpr (Update::kVariance) element.variance = widen(variance[i]);
      Update::apply(numbers, element);
      weight[i] = narrow<W>(element.weight);
      gradient[i] = narrow<G>(element.gradient);
      if constexpr (Update::kMomentum) momentum[i] = narrow<W>(element.momentum);
      if constexpr (Update::kVariance) variance[i] = narrow<W>(element.variance);
      if constexpr (kHasLow) low[i] = narrow<G>(element.weight);
    }
  }

  __device__ void store(const Arrays& to, int at, bool store_gradient) const {
    copy<Packed>(to.weight + at, weight);
    if (store_gradient) copy<PackedG>(to.gradient + at, gradient);
    if constexpr (Update::kMomentum) copy<Packed>(to.momentum + at, momentum);
    if constexpr (Update::kVariance) copy<Packed>(to.variance + at, variance);
    if constexpr (kHasLow) copy<PackedG>(to.low + at, low);
  }

 private:
  static constexpr bool kHasLow = !std::is_same_v<W, G>;

  template <class As, class T>
  __device__ static void copy(T* to, const T* from) {
    *reinterpret_cast<As*>(to) = *reinterpret_cast<const As*>(from);
  }

  alignas(Packed) W weight[kCount];
  alignas(Packed) W momentum[kCount];
  alignas(Packed) W variance[kCount];
  alignas(PackedG) G gradient[kCount];
  alignas(PackedG) G low[kCount];
};

template <class W, class G, class Update, class Table>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ Table table) {
  // From the end: the gradients that the scan has read last are still in the cache.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const UpdateEntry& entry = table.entries[entry_of(table, block)];
  if (entry.slot->skip != 0) return;
  using Numbers = typename Update::template Numbers<Wide<W>>;
  static_assert(sizeof(Numbers) <= sizeof(UpdateSlot::numbers));
  const Numbers numbers = *reinterpret_cast<const Numbers*>(entry.slot->numbers);
  const bool store_gradient = table.store_gradients && numbers.factor != 1;
  const int64_t begin = static_cast<int64_t>(block - entry.first_chunk) * kUpdateChunk;
  const int64_t count = entry.count - begin;
  const UpdateArrays<W, G> arrays(entry, begin);
  if (entry.aligned && count >= kUpdateChunk) {
    constexpr int kUnroll = sizeof(W) == sizeof(double) ? 1 : 2;
    constexpr int kStride = kThreads * kWidth;
    for (int first = 0; first < kUpdateChunk; first += kStride * kUnroll) {
      const int mine = first + static_cast<int>(threadIdx.x) * kWidth;
      UpdateBatch<W, G, Update, kWidth> batches[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) batches[u].load(arrays, mine + u * kStride);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        batches[u].apply(numbers);
        batches[u].store(arrays, mine + u * kStride, store_gradient);
      }
    }
  } else {
    const int end = static_cast<int>(count < kUpdateChunk ? count : kUpdateChunk);
    for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreads) {
      UpdateBatch<W, G, Update, 1> one;
      one.load(arrays, i);
      one.apply(numbers);
      one.store(arrays, i, store_gradient);
    }
  }
}

inline bool is_aligned(const GpuUpdateItem& item) {
  const int64_t wide = dtype_bytes(item.dtype);
  const int64_t low = dtype_bytes(item.gradient_dtype);
  return is_aligned(item.weight, wide) && is_aligned(item.momentum, wide) &&
         is_aligned(item.variance, wide) && is_aligned(item.gradient, low) &&
         is_aligned(item.low, low);
}

template <class W, class G, class Update, class Table>
void launch_updates(const std::vector<const GpuUpdateItem*>& items, bool store_gradients,
                    CudaStream stream) {
  constexpr int kEntries = sizeof(Table::entries) / sizeof(UpdateEntry);
  Table table = {};
  table.store_gradients = store_gradients;
  int64_t chunks = 0;
  const auto launch = [&] {
    if (table.count == 0) return;
    update<W, G, Update><<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(table);
    check(cudaGetLastError(), "update weights");
    table.count = 0;
    chunks = 0;
  };
  for (const GpuUpdateItem* item : items) {
    const int64_t more = (item->count + kUpdateChunk - 1) / kUpdateChunk;
    if (table.count == kEntries || chunks + more > kMostChunks) launch();
    table.entries[table.count++] = {
        item->weight,     item->gradient, item->momentum, item->variance,
        item->low,        item->slot,     item->count,    static_cast<int32_t>(chunks),
        is_aligned(*item)};
    chunks += more;
  }
  launch();
}

/// Those of `items` that are of this kind.
template <class W, class G, class Update>
void update_kind(std::span<const GpuUpdateItem> items, Dtype dtype, Dtype gradient_dtype,
                 bool store_gradients, CudaStream stream) {
  std::vector<const GpuUpdateItem*> mine;
  for (const GpuUpdateItem& item : items) {
    if (item.dtype == dtype && item.gradient_dtype == gradient_dtype &&
        (item.momentum != nullptr) == Update::kMomentum) {
      mine.push_back(&item);
    }
  }
  if (mine.size() <= 60) {
    launch_updates<W, G, Update, SmallUpdateTable>(mine, store_gradients, stream);
  } else {
    launch_updates<W, G, Update, LargeUpdateTable>(mine, store_gradients, stream);
  }
}

template <class Update>
void update_kinds(std::span<const GpuUpdateItem> items, bool store, CudaStream stream) {
  using Half = __half;
  using Brain = __nv_bfloat16;
  update_kind<float, float, Update>(items, Dtype::kF32, Dtype::kF32, store, stream);
  update_kind<double, double, Update>(items, Dtype::kF64, Dtype::kF64, store, stream);
  update_kind<Half, Half, Update>(items, Dtype::kF16, Dtype::kF16, store, stream);
  update_kind<Brain, Brain, Update>(items, Dtype::kBF16, Dtype::kBF16, store, stream);
  update_kind<float, Half, Update>(items, Dtype::kF32, Dtype::kF16, store, stream);
  update_kind<float, Brain, Update>(items, Dtype::kF32, Dtype::kBF16, store, stream);
}

}  // namespace lockstep::gpu
