#include <fmt/format.h>
#include <torch/torch.h>

#include "layers/layer_inputs.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"
#if LOCKSTEP_CUDA
#include "layers/cuda/layers.hpp"
#endif

namespace lockstep {

torch::Tensor mean_squared_error(const torch::Tensor& x, const torch::Tensor& target) {
  if (x.sizes() != target.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("mean_squared_error: x is {} and target {}", layers::shape_text(x),
                            layers::shape_text(target)),
                "give both the same shape");
  }
#if LOCKSTEP_CUDA
  if (layers::fit_kernels({x}) && layers::cuda_squared_error_fits(x, target)) {
    return layers::cuda_mean_squared_error(x, target);
  }
#endif
  const auto wide = layers::is_low_precision(x) ? x.to(torch::kFloat32) : x;
  return torch::mse_loss(wide, target.to(wide.scalar_type()));
}

}  // namespace lockstep
