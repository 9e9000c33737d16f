#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/types.h>

#include <string>
#include <tuple>
#include <vector>

#include "base/cuda_stream.hpp"
#include "lockstep/error.hpp"
#include "lockstep/fused_layers.hpp"

// The layers on a GPU. Their tensors are all on one GPU, not empty, and of one half-precision dtype
// where nothing else is said.
namespace lockstep::layers {

using torch::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// A chain of layers: `between` follows all but the last, `after` the last. x: [rows, in].
Tensor cuda_linear_chain(const Tensor& x, const std::vector<Tensor>& weights,
                         const std::vector<Tensor>& biases, Activation between, Activation after);

/// Whether the kernels can do this: weight and bias are both of x's dtype or both float32, the
/// width is a multiple of 8 and at most 8192, and addresses are multiples of 16.
bool cuda_layer_norm_fits(const Tensor& x, const Tensor& branch, const Tensor& weight,
                          const Tensor& bias);
std::tuple<Tensor, Tensor> cuda_add_layer_norm(const Tensor& x, const Tensor& branch,
                                               const Tensor& weight, const Tensor& bias,
                                               double eps);

/// Uses cuDNN's attention where it fits, else what libtorch chooses.
Tensor cuda_causal_self_attention(const Tensor& qkv, int64_t heads);

/// Whether the kernels can do this: the number of values is a multiple of 8, addresses are
/// multiples of 16, and the target is of x's dtype or float32 and needs no gradient.
bool cuda_squared_error_fits(const Tensor& x, const Tensor& target);
Tensor cuda_mean_squared_error(const Tensor& x, const Tensor& target);

/// Whether the kernels can do this: the number of classes is a multiple of 8.
bool cuda_cross_entropy_fits(const Tensor& weight);
Tensor cuda_linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                                 int64_t valid_classes);

/// Guard for a layer's own work, forward or backward: selects the GPU of its tensors, and keeps
/// autograd and autocast out of libtorch's operations.
class LayerScope {
 public:
  explicit LayerScope(const Tensor& tensor)
      : gpu_(tensor.device()), no_autocast_(c10::autocast_dispatch_keyset) {}

 private:
  c10::cuda::CUDAGuard gpu_;
  at::AutoDispatchBelowADInplaceOrView no_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

inline CudaStream current_stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

/// Whether kernels that take 16 bytes at a time can read the tensor; true if it is undefined.
inline bool is_aligned(const Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

/// Refuses backward with create_graph = true.
inline void require_first_derivative(const std::string& layer) {
  if (!torch::GradMode::is_enabled()) return;
  throw Error(Code::kEngine,
              "lockstep::" + layer + " cannot be differentiated twice (create_graph = true)",
              "use torch's own operations for the part that needs second derivatives");
}

}  // namespace lockstep::layers
