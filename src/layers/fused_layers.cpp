#include "lockstep/fused_layers.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>

#include "base/counted.hpp"
#include "layers/cpu_linear.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "torch_compat.hpp"
#if LOCKSTEP_CUDA
#include "layers/cuda/layers.hpp"
#endif

// Each layer checks its shapes, then runs lockstep's kernels where they fit the tensors, and
// libtorch's operations everywhere else.

namespace lockstep {
namespace {

bool is_low_precision(const torch::Tensor& tensor) {
  return tensor.scalar_type() == torch::kHalf || tensor.scalar_type() == torch::kBFloat16;
}

void require_linear_shapes(const std::string& who, int64_t width, const torch::Tensor& weight,
                           const torch::Tensor& bias) {
  if (weight.dim() != 2) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: the weight is {}, not [out, in]", who, shape_text(weight.sizes())),
                "pass a weight of two dimensions, as torch::nn::Linear holds it");
  }
  if (width != weight.size(1)) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: a row has {}, but the weight {} takes {}", who,
                            counted(width, "value"), shape_text(weight.sizes()), weight.size(1)),
                "let the last dimension of x be the weight's second");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: the bias is {}, but the weight {} gives {} values a row", who,
                            shape_text(bias.sizes()), shape_text(weight.sizes()), weight.size(0)),
                "pass a bias of that length, or an undefined tensor for none");
  }
}

void require_norm_width(const char* what, const torch::Tensor& tensor, const torch::Tensor& x) {
  if (tensor.defined() && (tensor.dim() != 1 || x.dim() < 1 || tensor.size(0) != x.size(-1))) {
    throw Error(Code::kTensorMismatch,
                fmt::format("add_layer_norm: x is {}, but the {} is {}", shape_text(x.sizes()),
                            what, shape_text(tensor.sizes())),
                "let weight and bias be as long as the last dimension of x");
  }
}

void require_targets(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& targets, int64_t valid_classes) {
  if (x.dim() != 2 || targets.dim() != 1 || targets.size(0) != x.size(0) ||
      targets.scalar_type() != torch::kLong) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("linear_cross_entropy: x is {}, targets are {} of {}", shape_text(x.sizes()),
                    shape_text(targets.sizes()), toString(targets.scalar_type())),
        "pass x as [rows, width] and targets as int64 [rows]");
  }
  require_linear_shapes("linear_cross_entropy", x.size(1), weight, {});
  if (valid_classes < 1 || valid_classes > weight.size(0)) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("linear_cross_entropy: {} valid classes of {}", valid_classes, weight.size(0)),
        "pass between 1 and the weight's first dimension, or -1 for all");
  }
}

#if LOCKSTEP_CUDA

/// The tensor as Autocast hands it to a matrix product; unchanged where Autocast is off.
torch::Tensor as_autocast(const torch::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto kind = tensor.device().type();
  if (kind != at::kCPU && kind != at::kCUDA) return tensor;
  const auto now = compat::AutocastSwitch::get(kind);
  return now.enabled ? at::autocast::cached_cast(now.dtype, tensor, kind) : tensor;
}

/// Whether the kernels can take these together: all are on one GPU, all are float16 or all are
/// bfloat16, and none is empty. Undefined tensors do not matter.
bool fit_kernels(at::TensorList tensors) {
  const torch::Tensor* first = nullptr;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (!first) first = &tensor;
    if (!tensor.is_cuda() || !is_low_precision(tensor) || tensor.numel() == 0 ||
        tensor.layout() != torch::kStrided || tensor.device() != first->device() ||
        tensor.scalar_type() != first->scalar_type()) {
      return false;
    }
  }
  return first != nullptr;
}

#endif

void require_heads(const char* who, const torch::Tensor& qkv, int64_t heads) {
  if (qkv.dim() == 3 && heads >= 1 && qkv.size(2) % (3 * heads) == 0) return;
  throw Error(Code::kTensorMismatch,
              fmt::format("{}: {} cannot be queries, keys and values of {} heads", who,
                          shape_text(qkv.sizes()), heads),
              "pass [batch, positions, 3 * width] with a width that the heads divide");
}

// Queries, keys and values: [3][batch, heads, positions, head width].
std::vector<torch::Tensor> split_heads(const torch::Tensor& qkv, int64_t heads) {
  return qkv.view({qkv.size(0), qkv.size(1), 3, heads, qkv.size(2) / (3 * heads)})
      .permute({2, 0, 3, 1, 4})
      .unbind(0);
}

torch::Tensor merge_heads(const torch::Tensor& mixed) {
  return mixed.transpose(1, 2).reshape({mixed.size(0), mixed.size(2), -1});
}

// Attention in which the last query sees all keys, and each before it one less.
torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value,
                     const std::function<torch::Tensor(const torch::Tensor&)>& drop) {
  const int64_t queries = query.size(2);
  const int64_t keys = key.size(2);
  auto scores = torch::matmul(query * (1.0 / std::sqrt(static_cast<double>(query.size(3)))),
                              key.transpose(2, 3));
  if (queries > 1) {
    const auto later =
        torch::ones({queries, keys}, torch::device(query.device()).dtype(torch::kBool))
            .triu(1 + keys - queries);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  auto weights = torch::softmax(scores, -1);
  if (drop) weights = drop(weights);
  return torch::matmul(weights.to(value.scalar_type()), value);
}

torch::Tensor activate(const torch::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kNone:
      break;
  }
  return x;
}

int64_t width_of(const torch::Tensor& x) {
  return x.dim() < 1 ? 0 : x.size(-1);
}

torch::Tensor product(const torch::Tensor& x, const torch::Tensor& weight,
                      const torch::Tensor& bias) {
  const auto autocast = compat::AutocastSwitch::get(at::kCPU);
  // The kernels round weights themselves. Other dtypes of Autocast have none.
  const bool rounds = autocast.enabled && autocast.dtype == torch::kBFloat16 && x.is_cpu() &&
                      x.scalar_type() == torch::kFloat;
  const torch::Tensor rows = rounds ? x.to(torch::kBFloat16) : x;
  const bool as_is = !autocast.enabled || autocast.dtype == rows.scalar_type();
  return as_is && layers::cpu_linear_fits(rows, weight, bias)
             ? layers::cpu_linear(rows, weight, bias)
             : torch::linear(x, weight, bias);
}

torch::Tensor linear_chain(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                           const std::vector<torch::Tensor>& biases, Activation between,
                           Activation after) {
#if LOCKSTEP_CUDA
  std::vector<torch::Tensor> cast = {as_autocast(x)};
  for (const auto& weight : weights) cast.push_back(as_autocast(weight));
  for (const auto& bias : biases) cast.push_back(as_autocast(bias));
  if (fit_kernels(cast)) {
    const auto first_weight = cast.begin() + 1;
    const auto first_bias = first_weight + static_cast<std::ptrdiff_t>(weights.size());
    const std::vector<torch::Tensor> cast_weights(first_weight, first_bias);
    const std::vector<torch::Tensor> cast_biases(first_bias, cast.end());
    const auto rows = x.dim() == 2 ? cast[0] : cast[0].reshape({-1, x.size(-1)});
    const auto out = layers::cuda_linear_chain(rows, cast_weights, cast_biases, between, after);
    if (x.dim() == 2) return out;
    auto sizes = x.sizes().vec();
    sizes.back() = out.size(1);
    return out.view(sizes);
  }
#endif
  torch::Tensor out = x;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool last = i + 1 == weights.size();
    out = activate(product(out, weights[i], biases[i]), last ? after : between);
  }
  return out;
}

}  // namespace

torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                     Activation activation) {
  require_linear_shapes("linear", width_of(x), weight, bias);
  return linear_chain(x, {weight}, {bias}, Activation::kNone, activation);
}

LinearImpl::LinearImpl(const torch::nn::LinearOptions& chosen) : options(chosen) {
  reset();
}

void LinearImpl::reset() {
  const torch::nn::Linear initial(options);
  weight = register_parameter("weight", initial->weight.detach());
  bias = register_parameter("bias", options.bias() ? initial->bias.detach() : torch::Tensor(),
                            /*requires_grad=*/options.bias());
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << std::boolalpha
         << options.bias() << ")";
}

torch::Tensor multi_layer(const torch::Tensor& x, const std::vector<torch::Tensor>& weights,
                          const std::vector<torch::Tensor>& biases, Activation between) {
  if (weights.empty() || weights.size() != biases.size()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("multi_layer: {} weights and {} biases", weights.size(), biases.size()),
                "pass one bias for each weight, an undefined tensor where a layer has none");
  }
  int64_t width = width_of(x);
  for (size_t i = 0; i < weights.size(); ++i) {
    require_linear_shapes(fmt::format("multi_layer, layer {}", i), width, weights[i], biases[i]);
    width = weights[i].size(0);
  }
  return linear_chain(x, weights, biases, between, Activation::kNone);
}

std::tuple<torch::Tensor, torch::Tensor> add_layer_norm(const torch::Tensor& x,
                                                        const torch::Tensor& branch,
                                                        const torch::Tensor& weight,
                                                        const torch::Tensor& bias, double eps) {
  if (branch.defined() && branch.sizes() != x.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("add_layer_norm: x is {}, but the branch is {}", shape_text(x.sizes()),
                            shape_text(branch.sizes())),
                "let both have the same shape");
  }
  require_norm_width("weight", weight, x);
  require_norm_width("bias", bias, x);
#if LOCKSTEP_CUDA
  if (fit_kernels({x, branch}) && layers::cuda_layer_norm_fits(x, branch, weight, bias)) {
    return layers::cuda_add_layer_norm(x, branch, weight, bias, eps);
  }
#endif
  const auto sum = branch.defined() ? x + branch : x;
  const auto as_sum = [&](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.to(sum.scalar_type()) : tensor;
  };
  return {sum, at::layer_norm(sum, {sum.size(-1)}, as_sum(weight), as_sum(bias), eps)};
}

torch::Tensor causal_self_attention(
    const torch::Tensor& qkv, int64_t heads,
    const std::function<torch::Tensor(const torch::Tensor&)>& drop) {
  require_heads("causal_self_attention", qkv, heads);
#if LOCKSTEP_CUDA
  const auto cast = as_autocast(qkv);
  if (!drop && fit_kernels({cast})) return layers::cuda_causal_self_attention(cast, heads);
#endif
  const auto parts = split_heads(qkv, heads);
  if (!drop) {
    if (const auto fused = compat::causal_attention(parts[0], parts[1], parts[2])) {
      return merge_heads(*fused);
    }
  }
  return merge_heads(attend(parts[0], parts[1], parts[2], drop));
}

torch::Tensor cached_self_attention(const torch::Tensor& qkv, int64_t heads, KeyValueCache& cache) {
  require_heads("cached_self_attention", qkv, heads);
  const torch::NoGradGuard no_grad;
  const auto parts = split_heads(qkv, heads);
  const auto join = [](const torch::Tensor& seen, const torch::Tensor& more) {
    return seen.defined() ? torch::cat({seen, more}, 2) : more.contiguous();
  };
  cache.keys = join(cache.keys, parts[1]);
  cache.values = join(cache.values, parts[2]);
  return merge_heads(attend(parts[0], cache.keys, cache.values, {}));
}

torch::Tensor mean_squared_error(const torch::Tensor& x, const torch::Tensor& target) {
  if (x.sizes() != target.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("mean_squared_error: x is {} and target {}", shape_text(x.sizes()),
                            shape_text(target.sizes())),
                "give both the same shape");
  }
#if LOCKSTEP_CUDA
  if (fit_kernels({x}) && layers::cuda_squared_error_fits(x, target)) {
    return layers::cuda_mean_squared_error(x, target);
  }
#endif
  const auto wide = is_low_precision(x) ? x.to(torch::kFloat32) : x;
  return torch::mse_loss(wide, target.to(wide.scalar_type()));
}

torch::Tensor linear_cross_entropy(const torch::Tensor& x, const torch::Tensor& weight,
                                   const torch::Tensor& targets, int64_t valid_classes) {
  if (valid_classes == -1 && weight.dim() == 2) valid_classes = weight.size(0);
  require_targets(x, weight, targets, valid_classes);
#if LOCKSTEP_CUDA
  const auto cast_x = as_autocast(x);
  const auto cast_weight = as_autocast(weight);
  if (fit_kernels({cast_x, cast_weight}) && targets.device() == x.device() &&
      layers::cuda_cross_entropy_fits(cast_weight)) {
    return layers::cuda_linear_cross_entropy(cast_x, cast_weight, targets, valid_classes);
  }
#endif
  auto logits = torch::linear(x, weight).narrow(1, 0, valid_classes);
  if (is_low_precision(logits)) logits = logits.to(torch::kFloat);
  return torch::nll_loss(torch::log_softmax(logits, 1), targets);
}

#if !LOCKSTEP_CUDA
void tune_layers(bool) {}  // only cuBLASLt has algorithms to choose from
#endif

}  // namespace lockstep
