#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "optim/gpu_update.hpp"
#include "optim/step_items.hpp"

// A fused optimizer's step on GPUs, in builds with CUDA only.
namespace lockstep {

/// What GPUs count and compute for an optimizer's parameters, in their own memory. A slot never
/// moves, because captured steps point to it.
class GpuSlots {
 public:
  struct Found {
    UpdateSlot* slot = nullptr;
    bool is_new = false;  ///< all zeros
  };

  /// Returns the slot of each item and makes those that are missing. Refuses to make one while a
  /// step is captured.
  std::vector<Found> of(const StepItems& items);

  /// Whether a parameter is on another GPU than its slot.
  bool any_moved(const StepItems& items) const;

  /// Returns the number of updates of each parameter. Waits for the GPUs.
  std::unordered_map<c10::TensorImpl*, int64_t> steps() const;

  /// Returns an owner of the memory, for captured steps to keep.
  std::shared_ptr<const void> memory() const;

 private:
  struct Position {
    size_t block = 0;
    int64_t row = 0;
  };
  UpdateSlot* address(const Position& position) const;

  std::vector<torch::Tensor> blocks_;  // each [row][bytes of a slot, as doubles]
  std::unordered_map<c10::TensorImpl*, Position> positions_;  // [parameter]
};

/// Returns the current rates of all groups.
using RatesSource = std::function<std::vector<GroupRates>()>;

/// The state of one item.
struct GpuItemState {
  torch::Tensor momentum;  ///< undefined: none
  torch::Tensor variance;
  UpdateSlot* slot = nullptr;
  int64_t start = -1;  ///< as in GpuPrepareItem
};

/// Updates the items, each on its GPU, in the order of that GPU's current stream. Returns the norm
/// of the unscaled gradients, which the GPU writes; undefined where extras ask for none.
torch::Tensor step_on_gpus(GpuOptimizer optimizer, const StepItems& items,
                           std::span<const GpuItemState> states, const RatesSource& rates,
                           const ScaledGradients& gradients, const StepExtras& extras);

/// While a step is captured: makes its graphs keep this memory, and refuses a replay (kCapture)
/// once the optimizer has other slots. `slots` is the optimizer's own member.
void keep_for_replays(const std::shared_ptr<GpuSlots>& slots,
                      const std::vector<GpuItemState>& states);

}  // namespace lockstep
