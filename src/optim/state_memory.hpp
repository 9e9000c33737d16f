#pragma once

#include <torch/types.h>

#include <span>
#include <string_view>
#include <vector>

namespace lockstep {

/// Whether element i of both lies at the same distance from the first, for every i.
bool same_memory_order(const torch::Tensor& a, const torch::Tensor& b);

/// Zeroed tensors like these, of the same strides too: one allocation for each dtype and device.
/// Each has a storage of its own, so that saving one does not write them all.
std::vector<torch::Tensor> zeros_like_all(std::span<const torch::Tensor> models);

/// A state tensor as its weight lies in memory: itself where it does so already, as a state that
/// was loaded or whose weight has moved may not. `what` names it in errors.
torch::Tensor fit_state(const torch::Tensor& state, const torch::Tensor& weight,
                        std::string_view what);

}  // namespace lockstep
