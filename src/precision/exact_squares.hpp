#pragma once

#include <torch/types.h>

#include <span>

namespace lockstep {

// Note [Exact sums of squares]: where ranks hold parts of a model, the sum of squares of all
// gradients is a sum of sums, and its last bits depend on where the parts are cut. A weight that is
// trained with virtual shards must not depend on that. So its square, rounded to double as every
// square is, is added as a whole number: in units of the smallest double, with as many bits as the
// largest sum needs. Whole numbers can be added in any order.

/// The sum of squares of all elements, as words of 32 bits, int64 on `home`. Words of several ranks
/// can be added element by element. Gradients on a GPU are copied to the host.
torch::Tensor exact_squares(std::span<const torch::Tensor> gradients, torch::Device home);

/// The double that such words, or a sum of them, stand for, as a scalar on their device: infinity
/// or NaN if one of the squares was.
torch::Tensor value_of_squares(const torch::Tensor& words);

}  // namespace lockstep
