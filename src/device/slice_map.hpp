#pragma once

#include <torch/types.h>

#include "checkpoint/layout.hpp"

namespace lockstep {

/// Notes which part of a whole tensor this parameter is. Layers that divide their weights over
/// ranks say so; a checkpoint stores the parts as such, and can then be loaded by other numbers of
/// ranks.
void note_slice(const torch::Tensor& parameter, Slice slice);

/// What was noted; the whole tensor if nothing was.
Slice slice_of(const torch::Tensor& parameter);

}  // namespace lockstep
