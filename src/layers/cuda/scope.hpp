#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/types.h>

#include <string>

#include "lockstep/error.hpp"

namespace lockstep::layers {

/// Guard for a layer's own work, forward or backward: on its tensors' GPU, and libtorch's
/// operations are what they are, neither recorded for autograd nor cast.
class LayerScope {
 public:
  explicit LayerScope(const torch::Tensor& tensor)
      : gpu_(tensor.device()), no_autocast_(c10::autocast_dispatch_keyset) {}

 private:
  c10::cuda::CUDAGuard gpu_;
  at::AutoDispatchBelowADInplaceOrView no_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
};

/// Whether kernels that take 16 bytes at a time can read it; what is undefined is not read.
inline bool is_aligned(const torch::Tensor& tensor) {
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
