#include "optim/cuda/gpu_numbers.cuh"
#include "optim/gpu_update.hpp"
#include "precision/cuda/gpu_lists.cuh"

namespace lockstep {
namespace {

using namespace gpu;

constexpr double kNormEpsilon = 1e-6;  // clip_grad_norm_'s
constexpr int kMostGroups = 32;        // of a launch

template <int kEntries>
struct PrepareTable {
  GpuPrepareItem entries[kEntries];  // their groups count from the first of this launch
  GroupRates groups[kMostGroups];
  const GroupRates* on_gpu;  // the first of this launch; null: `groups` holds
  GpuStepNumbers numbers;
  int count;
};
using SmallPrepareTable = PrepareTable<60>;
using LargePrepareTable = PrepareTable<1000>;
static_assert(sizeof(LargePrepareTable) <= kMostParameterBytes);

// `writes`: this thread leaves the norm for the host to ask for.
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

}  // namespace lockstep
