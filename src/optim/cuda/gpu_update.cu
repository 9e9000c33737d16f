#include "optim/gpu_update.hpp"

#include <type_traits>
#include <vector>

#include "precision/cuda/gpu_lists.cuh"

namespace lockstep {
namespace {

using namespace gpu;

// The update of one element, from the numbers in its slot. The formulas and their order are those
// of update_loops.hpp. Products are not fused with sums, so that a GPU rounds as a CPU does.

__device__ inline float mul(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ inline double mul(double a, double b) {
  return __dmul_rn(a, b);
}
__device__ inline float add(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ inline double add(double a, double b) {
  return __dadd_rn(a, b);
}
__device__ inline float sub(float a, float b) {
  return __fsub_rn(a, b);
}
__device__ inline double sub(double a, double b) {
  return __dsub_rn(a, b);
}
__device__ inline float quotient(float a, float b) {
  return __fdiv_rn(a, b);
}
__device__ inline double quotient(double a, double b) {
  return __ddiv_rn(a, b);
}
__device__ inline float root(float a) {
  return __fsqrt_rn(a);
}
__device__ inline double root(double a) {
  return __dsqrt_rn(a);
}

template <class T>
struct SgdNumbers {
  T factor, lr, weight_decay, keep, take, nesterov_factor;
  T nesterov;  // 1 or 0
};

template <class T>
struct AdamNumbers {
  T factor, gradient_decay, decay, beta1, beta2, take1, take2, step_size, root_factor, eps;
};

/// One element of each array; `gradient` ends as it was multiplied.
template <class T>
struct Element {
  T weight, gradient, momentum, variance;
};

template <bool kWithMomentum>
struct SgdUpdate {
  static constexpr bool kMomentum = kWithMomentum;
  static constexpr bool kVariance = false;
  template <class T>
  using Numbers = SgdNumbers<T>;

  template <class T>
  __device__ static void apply(const Numbers<T>& by, Element<T>& element) {
    element.gradient = mul(element.gradient, by.factor);
    T direction = element.gradient;
    if (by.weight_decay != 0) direction = add(direction, mul(by.weight_decay, element.weight));
    if constexpr (kMomentum) {
      element.momentum = add(mul(by.keep, element.momentum), mul(by.take, direction));
      direction = by.nesterov != 0 ? add(direction, mul(by.nesterov_factor, element.momentum))
                                   : element.momentum;
    }
    element.weight = sub(element.weight, mul(by.lr, direction));
  }
};

struct AdamUpdate {
  static constexpr bool kMomentum = true;
  static constexpr bool kVariance = true;
  template <class T>
  using Numbers = AdamNumbers<T>;

  template <class T>
  __device__ static void apply(const Numbers<T>& by, Element<T>& element) {
    T gradient = mul(element.gradient, by.factor);
    element.gradient = gradient;
    if (by.gradient_decay != 0) gradient = add(gradient, mul(by.gradient_decay, element.weight));
    element.momentum = add(mul(by.beta1, element.momentum), mul(by.take1, gradient));
    element.variance = add(mul(by.beta2, element.variance), mul(mul(by.take2, gradient), gradient));
    const T divisor = add(mul(root(element.variance), by.root_factor), by.eps);
    element.weight =
        sub(mul(by.decay, element.weight), mul(by.step_size, quotient(element.momentum, divisor)));
  }
};

// gpu_prepare: counts the step and computes its numbers, one thread for each parameter.

constexpr double kNormEpsilon = 1e-6;  // clip_grad_norm_'s
constexpr int kMostGroups = 32;        // in a launch

template <int kEntries>
struct PrepareTable {
  GpuPrepareItem entries[kEntries];  // with groups numbered from the first of this launch
  GroupRates groups[kMostGroups];
  const GroupRates* on_gpu;  // of the first group of this launch; null: use `groups`
  GpuStepNumbers numbers;
  int count;
};
using SmallPrepareTable = PrepareTable<60>;
using LargePrepareTable = PrepareTable<1000>;
static_assert(sizeof(LargePrepareTable) <= kMostParameterBytes);

// `writes`: this thread stores the norm.
__device__ double gradient_factor(const GpuStepNumbers& numbers, bool writes) {
  // Rounded once from double to float, as PyTorch's scaler does.
  const double inverse =
      numbers.scale == nullptr
          ? numbers.inverse_scale
          : static_cast<double>(static_cast<float>(1.0 / static_cast<double>(*numbers.scale)));
  if (numbers.sum_of_squares == nullptr) return inverse;
  const double norm = sqrt(*numbers.sum_of_squares) * inverse;
  if (writes && numbers.norm != nullptr) *numbers.norm = norm;
  const double coefficient = numbers.max_norm / (norm + kNormEpsilon);
  return inverse * (coefficient > 1 ? 1 : coefficient);
}

template <class T>
__device__ void write_sgd(UpdateSlot& slot, const GroupRates& rates, double factor, bool first) {
  SgdNumbers<T> numbers;
  numbers.factor = static_cast<T>(factor);
  numbers.lr = static_cast<T>(rates.lr);
  numbers.weight_decay = static_cast<T>(rates.weight_decay);
  numbers.keep = static_cast<T>(first ? 0 : rates.momentum);
  numbers.take = static_cast<T>(first ? 1 : 1 - rates.dampening);
  numbers.nesterov_factor = static_cast<T>(rates.momentum);
  numbers.nesterov = static_cast<T>(rates.nesterov);
  *reinterpret_cast<SgdNumbers<T>*>(slot.numbers) = numbers;
}

template <class T>
__device__ void write_adam(UpdateSlot& slot, const GroupRates& rates, double factor) {
  const auto steps = static_cast<double>(slot.steps);
  AdamNumbers<T> numbers;
  numbers.factor = static_cast<T>(factor);
  const bool decoupled = rates.decoupled != 0;
  numbers.gradient_decay = static_cast<T>(decoupled ? 0 : rates.weight_decay);
  numbers.decay = static_cast<T>(decoupled ? 1 - rates.lr * rates.weight_decay : 1);
  numbers.beta1 = static_cast<T>(rates.beta1);
  numbers.beta2 = static_cast<T>(rates.beta2);
  numbers.take1 = static_cast<T>(1 - rates.beta1);
  numbers.take2 = static_cast<T>(1 - rates.beta2);
  numbers.step_size = static_cast<T>(rates.lr / (1 - pow(rates.beta1, steps)));
  numbers.root_factor = static_cast<T>(1 / sqrt(1 - pow(rates.beta2, steps)));
  numbers.eps = static_cast<T>(rates.eps);
  *reinterpret_cast<AdamNumbers<T>*>(slot.numbers) = numbers;
}

template <GpuOptimizer kOptimizer, class Table>
__global__ void prepare(const __grid_constant__ Table table) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= table.count) return;
  const GpuPrepareItem& item = table.entries[index];
  UpdateSlot& slot = *item.slot;
  if (item.start >= 0) slot.steps = item.start;
  const double factor = gradient_factor(table.numbers, index == 0);
  const bool skip = table.numbers.found_inf != nullptr && *table.numbers.found_inf != 0;
  slot.skip = skip ? 1 : 0;
  if (skip) return;
  const GroupRates rates =
      table.on_gpu != nullptr ? table.on_gpu[item.group] : table.groups[item.group];
  const bool first = slot.steps == 0;
  slot.steps += 1;
  if constexpr (kOptimizer == GpuOptimizer::kSgd) {
    item.is_double ? write_sgd<double>(slot, rates, factor, first)
                   : write_sgd<float>(slot, rates, factor, first);
  } else {
    item.is_double ? write_adam<double>(slot, rates, factor)
                   : write_adam<float>(slot, rates, factor);
  }
}

template <GpuOptimizer kOptimizer, class Table>
void prepare_all(std::span<const GpuPrepareItem> items, std::span<const GroupRates> groups,
                 const GroupRates* on_gpu, const GpuStepNumbers& numbers, CudaStream stream) {
  constexpr int kEntries = sizeof(Table::entries) / sizeof(GpuPrepareItem);
  constexpr int kBlock = 64;
  Table table = {};
  table.numbers = numbers;
  for (size_t i = 0; i < items.size();) {
    const int32_t first_group = items[i].group;
    table.count = 0;
    table.on_gpu = on_gpu == nullptr ? nullptr : on_gpu + first_group;
    for (; i < items.size() && table.count < kEntries; ++i) {
      const int32_t group = items[i].group - first_group;
      if (group >= kMostGroups) break;
      table.groups[group] = groups[static_cast<size_t>(items[i].group)];
      table.entries[table.count] = items[i];
      table.entries[table.count++].group = group;
    }
    const auto blocks = static_cast<unsigned>((table.count + kBlock - 1) / kBlock);
    prepare<kOptimizer><<<blocks, kBlock, 0, stream>>>(table);
    check(cudaGetLastError(), "prepare an update");
  }
}

template <class Table>
void prepare_with(GpuOptimizer optimizer, std::span<const GpuPrepareItem> items,
                  std::span<const GroupRates> groups, const GroupRates* on_gpu,
                  const GpuStepNumbers& numbers, CudaStream stream) {
  if (optimizer == GpuOptimizer::kSgd) {
    prepare_all<GpuOptimizer::kSgd, Table>(items, groups, on_gpu, numbers, stream);
  } else {
    prepare_all<GpuOptimizer::kAdam, Table>(items, groups, on_gpu, numbers, stream);
  }
}

// gpu_update_sgd and gpu_update_adam: one chunk of a tensor for each block.

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

/// The arrays of a chunk. W is the type of weight and state, G that of the gradient and the rounded
/// weight.
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
  // Start at the end: the gradients that the scan read last are still in the cache.
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

bool all_aligned(const GpuUpdateItem& item) {
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
        item->weight,      item->gradient, item->momentum, item->variance,
        item->low,         item->slot,     item->count,    static_cast<int32_t>(chunks),
        all_aligned(*item)};
    chunks += more;
  }
  launch();
}

/// Updates those of `items` that have these types.
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

}  // namespace

void gpu_prepare(GpuOptimizer optimizer, std::span<const GpuPrepareItem> items,
                 std::span<const GroupRates> groups, const GroupRates* on_gpu,
                 const GpuStepNumbers& numbers, CudaStream stream) {
  if (items.size() <= 60) {
    prepare_with<SmallPrepareTable>(optimizer, items, groups, on_gpu, numbers, stream);
  } else {
    prepare_with<LargePrepareTable>(optimizer, items, groups, on_gpu, numbers, stream);
  }
}

void gpu_update_sgd(std::span<const GpuUpdateItem> items, bool store_gradients, CudaStream stream) {
  update_kinds<SgdUpdate<true>>(items, store_gradients, stream);
  update_kinds<SgdUpdate<false>>(items, store_gradients, stream);
}

void gpu_update_adam(std::span<const GpuUpdateItem> items, bool store_gradients,
                     CudaStream stream) {
  update_kinds<AdamUpdate>(items, store_gradients, stream);
}

}  // namespace lockstep
