#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

struct GpuSettleRules;
struct SkipRing;

/// What one reading pass over gradients finds.
struct GradientScan {
  int64_t first_nonfinite = -1;  ///< index of the first gradient with such an element; -1: none
  double sum_of_squares = 0;     ///< meaningful if all are finite
};

/// Reads dense CPU gradients; skips undefined ones. The bits do not depend on the number of
/// threads.
GradientScan scan_gradients(std::span<const torch::Tensor> gradients);

/// Multiplies the gradients in place and, in the same pass, looks for elements that are not finite.
/// Returns the index of the first gradient that had one; -1: all were finite.
int64_t unscale_gradients(std::span<const torch::Tensor> gradients, float inverse_scale);

/// What a GPU found in its gradients: scalars in its memory, unknown to the host.
struct GpuScan {
  torch::Tensor found_inf;       ///< float, 0 or 1
  torch::Tensor first;           ///< int: id of the first gradient that is not finite, or -1
  torch::Tensor sum_of_squares;  ///< double; 0 if it was not asked for

  GpuScan to(torch::Device device) const;
};

// In builds with CUDA only. Both use the current stream of their GPU, and the host does not wait.

/// Reads gradients of one GPU, none of them empty, of any floating dtype and memory order.
/// `ids`: [gradient].
GpuScan scan_on_gpu(std::span<const torch::Tensor> gradients, std::span<const int32_t> ids,
                    bool squares);

/// Calls gpu_settle. `scale`: the bytes of a GpuScale, on the GPU of the scans.
void settle_on_gpu(const torch::Tensor& scale, const std::vector<GpuScan>& scans,
                   const GpuSettleRules& rules, SkipRing* ring);

}  // namespace lockstep
