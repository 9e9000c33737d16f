#pragma once

#include <torch/types.h>

#include <unordered_map>
#include <vector>

#include "optim/gpu_update.hpp"
#include "optim/step_items.hpp"

namespace lockstep {

/// What GPUs count and compute for an optimizer's parameters, in memory of theirs. A slot stays
/// where it is, since captured steps point to it. Of builds with CUDA only.
class GpuSlots {
 public:
  struct Found {
    UpdateSlot* slot = nullptr;
    bool is_new = false;  ///< all zeros
  };

  /// [item]. Refuses, while a step is captured, to make one.
  std::vector<Found> of(const StepItems& items);

  /// Whether the slot of a parameter is on another GPU than the parameter.
  bool any_moved(const StepItems& items) const;

  /// [parameter]. Waits for the GPUs.
  std::unordered_map<c10::TensorImpl*, int64_t> steps() const;

  /// Keeps the memory alive together with a captured step.
  std::shared_ptr<const void> memory() const;

 private:
  struct Place {
    size_t block = 0;
    int64_t row = 0;
  };
  UpdateSlot* address(const Place& place) const;

  std::vector<torch::Tensor> blocks_;                   // each [row][bytes of a slot, as doubles]
  std::unordered_map<c10::TensorImpl*, Place> places_;  // [parameter]
};

}  // namespace lockstep
