#pragma once

#include <torch/types.h>

#include <cstdint>
#include <span>

namespace lockstep {

/// What one reading pass over gradients finds.
struct GradientScan {
  int64_t first_nonfinite = -1;  ///< index of the first gradient that has one; -1: all are finite
  double sum_of_squares = 0;     ///< meaningful where all are finite
};

/// CPU gradients, dense; undefined ones are passed over. The same bits for any number of threads.
GradientScan scan_gradients(std::span<const torch::Tensor> gradients);

/// Multiplies them in place, in the same pass that looks for what is not finite. The index of the
/// first gradient that had such an element before; -1: all were finite.
int64_t unscale_gradients(std::span<const torch::Tensor> gradients, float inverse_scale);

}  // namespace lockstep
