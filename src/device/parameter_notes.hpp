#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>

#include "checkpoint/layout.hpp"

// What is noted of a parameter while it lives.

namespace lockstep {

/// Notes which part of a whole tensor this parameter is. Layers that divide their weights over
/// ranks say so; a checkpoint stores the parts as such, and can then be loaded by other numbers of
/// ranks.
void note_slice(const torch::Tensor& parameter, Slice slice);

/// What was noted; the whole tensor if nothing was.
Slice slice_of(const torch::Tensor& parameter);

/// Notes that this parameter of a module is divided by FullyShardedDataParallel and not whole now,
/// or that it is whole again.
void note_sharded(const torch::Tensor& parameter, bool sharded);

/// Whether it is divided and not whole now.
bool is_sharded(const torch::Tensor& parameter);

/// What is wrong with such a parameter in an optimizer, and what to do.
inline constexpr const char* kShardedProblem =
    "is sharded by FullyShardedDataParallel and gets no gradient";
inline constexpr const char* kShardedRemedy = "give the optimizer fsdp.parameters()";

/// Refuses a module with such a parameter, for `what`, which would not see its weights or
/// gradients.
void require_not_sharded(const torch::nn::Module& module, const char* what, const char* remedy);

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
