#pragma once

#include <torch/types.h>

#include <vector>

#include "lockstep/device.hpp"

namespace lockstep {

/// One parameter's gradients: the sum so far, on device 0, and what other replicas add to it, in
/// order.
class GradientSum {
 public:
  /// `parts` are the replicas' gradients in device order; none at all is a sum that stays
  /// undefined.
  GradientSum(std::vector<torch::Tensor> parts, const Device& home);

  /// Adds one of `shares` equal shares. Shares touch disjoint memory, and each element is added in
  /// replica order, so the result does not depend on how many workers take part. What cannot be
  /// divided is added whole with share 0.
  void add_share(int64_t share, int64_t shares);

  torch::Tensor take() { return std::move(total_); }

 private:
  torch::Tensor total_;
  std::vector<torch::Tensor> others_;
  bool divisible_ = false;
};

/// Sums all, on the workers of the first `workers` devices where they are CPU devices.
void add_up(std::vector<GradientSum>& sums, const Devices& devices, size_t workers);

/// Bytes that sending a gradient takes; a sparse one is its indices and values.
int64_t gradient_bytes(const torch::Tensor& gradient);

}  // namespace lockstep
