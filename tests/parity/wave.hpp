#pragma once

#include <torch/types.h>

/// Values that Python computes alike.
inline torch::Tensor wave(torch::IntArrayRef sizes, double phase) {
  return torch::arange(c10::multiply_integers(sizes), torch::kDouble)
      .mul(0.37)
      .add(phase)
      .sin()
      .view(sizes);
}
