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

void require_width(const char* what, const torch::Tensor& tensor, const torch::Tensor& x) {
  if (tensor.defined() && (tensor.dim() != 1 || x.dim() < 1 || tensor.size(0) != x.size(-1))) {
    throw Error(Code::kTensorMismatch,
                fmt::format("add_layer_norm: x is {}, but the {} is {}", layers::shape_text(x),
                            what, layers::shape_text(tensor)),
                "let weight and bias be as long as the last dimension of x");
  }
}

}  // namespace

std::tuple<torch::Tensor, torch::Tensor> add_layer_norm(const torch::Tensor& x,
                                                        const torch::Tensor& branch,
                                                        const torch::Tensor& weight,
                                                        const torch::Tensor& bias, double eps) {
  if (branch.defined() && branch.sizes() != x.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("add_layer_norm: x is {}, but the branch is {}", layers::shape_text(x),
                            layers::shape_text(branch)),
                "let both have the same shape");
  }
  require_width("weight", weight, x);
  require_width("bias", bias, x);
#if LOCKSTEP_CUDA
  if (layers::fit_kernels({x, branch}) && layers::cuda_layer_norm_fits(x, branch, weight, bias)) {
    return layers::cuda_add_layer_norm(x, branch, weight, bias, eps);
  }
#endif
  const auto sum = branch.defined() ? x + branch : x;
  const auto as_sum = [&](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.to(sum.scalar_type()) : tensor;
  };
  return {sum, at::layer_norm(sum, {sum.size(-1)}, as_sum(weight), as_sum(bias), eps)};
}

}  // namespace lockstep
