#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>

namespace lockstep {

/// Returns the memory that a parameter's next gradient belongs in, as a tensor of the parameter's
/// shape, for the caller to write. Undefined if the gradient must go elsewhere, as one that is
/// added to another. A gradient that lies there need not be copied before it is averaged.
using ClaimGradientMemory = std::function<torch::Tensor()>;

/// Notes where gradients of this parameter belong, until `claim` is gone. A later note replaces it.
void note_gradient_memory(const torch::Tensor& parameter,
                          const std::shared_ptr<const ClaimGradientMemory>& claim);

/// Returns what was noted and is still there; empty if nothing is.
std::weak_ptr<const ClaimGradientMemory> gradient_memory_of(const torch::Tensor& parameter);

}  // namespace lockstep
