#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "precision/gpu_scale.hpp"

// GPU kernels as tensors see them, on the current stream of their GPU: nobody waits. Of builds with
// CUDA only.
namespace lockstep {

/// What a GPU found in gradients it holds. Scalars there; nothing of it is on the host.
struct GpuScan {
  torch::Tensor found_inf;       ///< float, 0 or 1
  torch::Tensor first;           ///< int: id of the first gradient that is not finite, or -1
  torch::Tensor sum_of_squares;  ///< double; 0 where it was not asked for

  GpuScan to(torch::Device device) const;
};

/// `gradients` of one GPU, none of them empty, of any floating dtype and memory order.
/// `ids`: [gradient].
GpuScan scan_on_gpu(std::span<const torch::Tensor> gradients, std::span<const int32_t> ids,
                    bool squares);

/// `scale`: a GpuScale's bytes on the GPU of the scans.
void settle_on_gpu(const torch::Tensor& scale, const std::vector<GpuScan>& scans,
                   const GpuSettleRules& rules, SkipRing* ring);

}  // namespace lockstep
