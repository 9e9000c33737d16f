#pragma once

#include <torch/types.h>

#include "course/options.hpp"
#include "lockstep/device.hpp"
#include "lockstep/world.hpp"

namespace course {

/// What --amp asks for on a device.
struct Precision {
  bool lower = false;  ///< matrix products run in `dtype`
  torch::ScalarType dtype = torch::kBFloat16;
};

/// Completes options.amp where it was not given. A precision that the device cannot compute with
/// is an Error.
Precision choose_precision(Options& options, const lockstep::Device& device);

/// Whether --overflow-at plants one on this rank in this step: on the last rank only, so that the
/// others must hear of it.
bool plants_overflow(const Options& options, int64_t step, const lockstep::World& world);

/// From now on the gradient that flows back through `out` is infinite in one place, as where fp16
/// overflows.
void plant_overflow(const torch::Tensor& out);

}  // namespace course
