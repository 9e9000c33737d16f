#pragma once

#include <cstdint>
#include <span>

#include "base/cuda_stream.hpp"
#include "base/dtype.hpp"

// Kernels that update weights, in builds with CUDA only: gpu_prepare, then gpu_update_sgd or
// gpu_update_adam on the same stream. The host waits for nothing and reads nothing, so that all of
// it can be captured.
namespace lockstep {

/// A group's numbers on the host; those of the other optimizer stay 0.
struct GroupRates {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;   // SGD
  double dampening = 0;  // SGD
  double nesterov = 0;   // SGD: 1 or 0
  double beta1 = 0;      // Adam
  double beta2 = 0;      // Adam
  double eps = 0;        // Adam
  double decoupled = 0;  // Adam: 1 if the decay is AdamW's, 0 if it is part of the gradient

  bool operator==(const GroupRates&) const = default;
};

/// What the GPU knows of one parameter. Its memory outlives the steps.
struct UpdateSlot {
  int64_t steps;  ///< updates so far, without skipped ones
  int32_t skip;   // 1: this step changes nothing
  int32_t unused;
  double numbers[10];  // of this step: SgdNumbers or AdamNumbers
};

/// Where the numbers of one step come from. Pointers are to the GPU's memory and may be null.
struct GpuStepNumbers {
  double inverse_scale = 1;                ///< used where `scale` is null
  const float* scale = nullptr;            ///< gradients are divided by it
  const float* found_inf = nullptr;        ///< not 0: skip
  const double* sum_of_squares = nullptr;  ///< of gradients before unscaling; null: no clipping
  double max_norm = 0;
  double* norm = nullptr;  ///< receives the norm of the unscaled gradients
};

struct GpuPrepareItem {
  UpdateSlot* slot = nullptr;
  int64_t start = -1;  ///< updates so far, if the slot is new; -1: the slot knows
  int32_t group = 0;   ///< ascending from item to item
  bool is_double = false;
};

/// One tensor's arrays, all in the same memory order.
struct GpuUpdateItem {
  void* weight = nullptr;
  void* gradient = nullptr;
  void* momentum = nullptr;  ///< SGD's buffer, Adam's first moment; SGD may have none
  void* variance = nullptr;  ///< Adam's second moment
  void* low = nullptr;       ///< the rounded weight, where gradient_dtype is not dtype
  const UpdateSlot* slot = nullptr;
  int64_t count = 0;          ///< at least 1
  Dtype dtype = Dtype::kF32;  ///< of weight and state
  Dtype gradient_dtype = Dtype::kF32;
};

enum class GpuOptimizer { kSgd, kAdam };

/// Counts the step in every slot and computes its numbers. `on_gpu`: rates of all groups in the
/// GPU's memory, which are then used instead of `groups`.
void gpu_prepare(GpuOptimizer optimizer, std::span<const GpuPrepareItem> items,
                 std::span<const GroupRates> groups, const GroupRates* on_gpu,
                 const GpuStepNumbers& numbers, CudaStream stream);

/// Applies the formulas of update_kernels.hpp, in float (double for F64), unless the slot says
/// skip. Weights may be F32, F64, F16 or BF16 with gradients of the same dtype, or F32 with F16 or
/// BF16 ones. `store_gradients`: writes back the gradients as they were multiplied.
void gpu_update_sgd(std::span<const GpuUpdateItem> items, bool store_gradients, CudaStream stream);
void gpu_update_adam(std::span<const GpuUpdateItem> items, bool store_gradients, CudaStream stream);

}  // namespace lockstep
