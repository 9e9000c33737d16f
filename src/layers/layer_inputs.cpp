#include "layers/layer_inputs.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "lockstep/error.hpp"
#include "torch_compat.hpp"

namespace lockstep::layers {

torch::Tensor autocast(const torch::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto kind = tensor.device().type();
  if (kind != at::kCPU && kind != at::kCUDA) return tensor;
  const auto now = compat::AutocastSwitch::get(kind);
  return now.enabled ? at::autocast::cached_cast(now.dtype, tensor, kind) : tensor;
}

bool is_low_precision(const torch::Tensor& tensor) {
  return tensor.scalar_type() == torch::kHalf || tensor.scalar_type() == torch::kBFloat16;
}

#if LOCKSTEP_CUDA

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

#else

bool fit_kernels(at::TensorList) {
  return false;
}

#endif

void require_linear_shapes(const std::string& who, int64_t width, const torch::Tensor& weight,
                           const torch::Tensor& bias) {
  if (weight.dim() != 2) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: the weight is {}, not [out, in]", who, shape_text(weight)),
                "pass a weight of two dimensions, as torch::nn::Linear holds it");
  }
  if (width != weight.size(1)) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: a row has {} values, but the weight {} takes {}", who, width,
                            shape_text(weight), weight.size(1)),
                "let the last dimension of x be the weight's second");
  }
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0))) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{}: the bias is {}, but the weight {} gives {} values a row", who,
                            shape_text(bias), shape_text(weight), weight.size(0)),
                "pass a bias of that length, or an undefined tensor for none");
  }
}

std::string shape_text(const torch::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

}  // namespace lockstep::layers
