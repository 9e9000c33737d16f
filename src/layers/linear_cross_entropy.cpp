#include <fmt/format.h>
#include <torch/torch.h>

#include "layers/layer_inputs.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"
#if LOCKSTEP_CUDA
#include "layers/cuda/layers.hpp"
#endif

namespace lockstep {
namespace {

void require_targets(const torch::Tensor& x, const torch::Tensor& weight,
                     const torch::Tensor& targets, int64_t valid_classes) {
  if (x.dim() != 2 || targets.dim() != 1 || targets.size(0) != x.size(0) ||
      targets.scalar_type() != torch::kLong) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("linear_cross_entropy: x is {}, targets are {} of {}", layers::shape_text(x),
                    layers::shape_text(targets), toString(targets.scalar_type())),
        "pass x as [rows, width] and targets as int64 [rows]");
  }
  layers::require_linear_shapes("linear_cross_entropy", x.size(1), weight, {});
  if (valid_classes < 1 || valid_classes > weight.size(0)) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("linear_cross_entropy: {} valid classes of {}", valid_classes, weight.size(0)),
        "pass between 1 and the weight's first dimension, or -1 for all");
  }
}

}  // namespace

torch::Tensor linear_cross_entropy(const torch::Tensor& x, const torch::Tensor& weight,
                                   const torch::Tensor& targets, int64_t valid_classes) {
  if (valid_classes == -1 && weight.dim() == 2) valid_classes = weight.size(0);
  require_targets(x, weight, targets, valid_classes);
#if LOCKSTEP_CUDA
  const auto cast_x = layers::autocast(x);
  const auto cast_weight = layers::autocast(weight);
  if (layers::fit_kernels({cast_x, cast_weight}) && targets.device() == x.device() &&
      layers::cuda_cross_entropy_fits(cast_weight)) {
    return layers::cuda_linear_cross_entropy(cast_x, cast_weight, targets, valid_classes);
  }
#endif
  auto logits = torch::linear(x, weight).narrow(1, 0, valid_classes);
  if (layers::is_low_precision(logits)) logits = logits.to(torch::kFloat);
  return torch::nll_loss(torch::log_softmax(logits, 1), targets);
}

}  // namespace lockstep
