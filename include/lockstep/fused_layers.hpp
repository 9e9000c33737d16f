#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <functional>
#include <iosfwd>
#include <tuple>
#include <vector>

// Layers that compute a bias, activation, norm or loss together with a matrix product or in a
// single pass. Each gives the results and gradients of the libtorch operations it stands for,
// within rounding. On a GPU, float16 and bfloat16 tensors use lockstep's kernels, which cannot be
// differentiated twice; on the CPU, so do float32 linear layers with few rows, which can.
// Everything else runs those operations. Autocast casts inputs as it does for torch::linear, except
// those of norms.

namespace lockstep {

/// What is applied to the output of linear(), and between the layers of multi_layer().
enum class Activation { kNone, kRelu, kGeluTanh };

/// activation(x · weightᵀ + bias). x: [..., in], weight: [out, in], bias: [out] or undefined.
torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     Activation activation = Activation::kNone);

/// torch::nn::Linear, computed by linear(): the same parameters, options and initial values.
class LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const torch::nn::LinearOptions& chosen);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  torch::Tensor forward(const torch::Tensor& x) { return linear(x, weight, bias); }

  torch::nn::LinearOptions options;
  torch::Tensor weight;  // [out, in]
  torch::Tensor bias;    // [out], or undefined
};
TORCH_MODULE(Linear);

/// A chain of linear layers with an activation between them. The backward of each layer includes
/// that of the activation before it. weights[i]: [out, in], biases[i]: [out] or undefined.
torch::Tensor multi_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                          const std::vector<torch::Tensor>& biases, Activation between);

/// {x + branch, layer_norm(x + branch)} over the last dimension, in one pass. branch may be
/// undefined.
std::tuple<torch::Tensor, torch::Tensor> add_layer_norm(const torch::Tensor& x,
                                                        const torch::Tensor& branch,
                                                        const torch::Tensor& weight,
                                                        const torch::Tensor& bias,
                                                        double eps = 1e-5);

/// Causal self-attention with heads side by side: qkv is [batch, positions, 3 * width], the result
/// [batch, positions, width]. `drop`, if given, is applied to the attention's weights, [batch,
/// heads, positions, positions], which then exist as a tensor; without it libtorch's
/// scaled_dot_product_attention is used where there is one.
torch::Tensor causal_self_attention(
    const torch::Tensor& qkv, int64_t heads,
    const std::function<torch::Tensor(const torch::Tensor&)>& drop = {});

/// Keys and values of the positions that a decoder has seen, of one block.
struct KeyValueCache {
  torch::Tensor keys;    ///< [batch, heads, positions, head width]; undefined: none yet
  torch::Tensor values;  ///< likewise

  int64_t positions() const { return keys.defined() ? keys.size(2) : 0; }
};

/// The same for positions that follow those in the cache, which they are added to: a decoder asks
/// for one position after the other. Without gradients.
torch::Tensor cached_self_attention(const torch::Tensor& qkv, int64_t heads, KeyValueCache& cache);

/// The mean of the squares of x - target, computed in float32 as torch::mse_loss is under Autocast,
/// in one pass forward and one backward. target is of x's dtype or float32 and gets no gradient.
torch::Tensor mean_squared_error(const torch::Tensor& x, const torch::Tensor& target);

/// The mean over rows of cross_entropy(x · weightᵀ, targets), computed and differentiated in pieces
/// so that the logits never exist all at once. x: [rows, width], weight: [classes, width], targets:
/// int64 [rows]. Classes from `valid_classes` on are padding that no target names.
torch::Tensor linear_cross_entropy(const torch::Tensor& x, const torch::Tensor& weight,
                                   const torch::Tensor& targets, int64_t valid_classes = -1);

/// On: each new shape of a matrix product is timed with several of cuBLASLt's algorithms on the
/// calling GPU, and the fastest is kept for the life of the process. This takes up to a second for
/// each shape, and repeated runs are equal within rounding only. Off, the default: cuBLASLt's first
/// choice is used, and repeated runs are equal bit for bit. Nothing is timed while a step is
/// captured, so warm up first.
void tune_layers(bool on);

}  // namespace lockstep
