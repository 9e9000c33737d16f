#pragma once

#include <memory>
#include <span>
#include <vector>

#include "lockstep/fused_step.hpp"
#include "optim/captured_rates.hpp"
#include "optim/gpu_slots.hpp"
#include "optim/step_items.hpp"

namespace lockstep {

/// The state of one item.
struct GpuItemState {
  torch::Tensor momentum;  ///< undefined: none
  torch::Tensor variance;
  UpdateSlot* slot = nullptr;
  int64_t start = -1;  ///< as GpuPrepareItem has it
};

/// Updates the items, each on its GPU, in the order of that GPU's current stream. Returns the norm
/// of the unscaled gradients, which the GPU writes; undefined where extras ask for none. Of builds
/// with CUDA only.
torch::Tensor step_on_gpus(GpuOptimizer optimizer, const StepItems& items,
                           std::span<const GpuItemState> states, const RatesSource& rates,
                           const ScaledGradients& gradients, const StepExtras& extras);

/// In a step that is captured: its graphs keep this memory, and a replay is refused (kCapture) once
/// the optimizer has other slots. `slots` is the optimizer's own member.
void keep_for_replays(const std::shared_ptr<GpuSlots>& slots,
                      const std::vector<GpuItemState>& states);

}  // namespace lockstep
