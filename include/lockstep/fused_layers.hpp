#pragma once

#include <torch/types.h>

#include <tuple>
#include <vector>

// Layers whose bias, activation, norm or loss rides along with a matrix product or a single pass.
// Each gives the numbers of the libtorch operations it stands for, within rounding, and their
// gradients. On a GPU with float16 or bfloat16 tensors they run lockstep's kernels; elsewhere those
// very operations. Under Autocast inputs are cast as torch::linear's are; those of norms stay as
// they are. They cannot be differentiated twice there.

namespace lockstep {

enum class Activation { kNone, kRelu, kGeluTanh };

/// activation(x · weightᵀ + bias). x: [..., in], weight: [out, in], bias: [out] or undefined.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     Activation activation = Activation::kNone);

/// A chain of linear layers with an activation between them: backward of each also undoes the
/// activation before it. weights[i]: [out, in], biases[i]: [out] or undefined.
torch::Tensor multi_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                          const std::vector<torch::Tensor>& biases, Activation between);

/// {x + branch, layer_norm(x + branch)} over the last dimension, in one pass. branch may be
/// undefined.
std::tuple<torch::Tensor, torch::Tensor> add_layer_norm(const torch::Tensor& x,
                                                        const torch::Tensor& branch,
                                                        const torch::Tensor& weight,
                                                        const torch::Tensor& bias,
                                                        double eps = 1e-5);

/// Causal self-attention of heads that lie side by side: qkv is [batch, positions, 3 * width],
/// the result [batch, positions, width].
torch::Tensor causal_self_attention(const torch::Tensor& qkv, int64_t heads);

/// The mean of the squares of x - target, computed in float32: torch::mse_loss as Autocast computes
/// it, in one pass forward and one backward. target: of x's dtype or float32; it gets no gradient.
torch::Tensor mean_squared_error(const torch::Tensor& x, const torch::Tensor& target);

/// mean over rows of cross_entropy(x · weightᵀ, targets), computed and differentiated in pieces so
/// that all logits never exist at once. x: [rows, width], weight: [classes, width], targets: int64
/// [rows]; classes from `valid_classes` on are padding that no target names.
torch::Tensor linear_cross_entropy(const torch::Tensor& x, const torch::Tensor& weight,
                                   const torch::Tensor& targets, int64_t valid_classes = -1);

/// From now on each new shape of a matrix product is timed with several of cuBLASLt's algorithms,
/// on the calling GPU, and the fastest is kept as long as the process lives. Costs up to a
/// second a shape. Off, as at the start: cuBLASLt's own first choice, so that a run repeated is
/// equal bit by bit; tuned runs are equal within rounding only. While a step is captured nothing is
/// timed: warm up.
void tune_layers(bool on);

}  // namespace lockstep
