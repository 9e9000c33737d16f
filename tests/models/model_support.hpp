#pragma once

#include <torch/torch.h>

#include "device/rng.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test {

inline torch::Tensor values(torch::IntArrayRef sizes, uint64_t seed = 7) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kFloat64);
}

inline torch::Tensor leaf(const torch::Tensor& from) {
  return from.detach().clone().requires_grad_();
}

/// This rank's equal slice along a dimension.
inline torch::Tensor own_slice(const torch::Tensor& whole, const Communicator& axis, int64_t dim) {
  return whole.chunk(axis.size(), dim)[static_cast<size_t>(axis.rank())];
}

/// Ranks that are threads share libtorch's generator; this gives a thread one of its own.
struct OwnRandomNumbers {
  explicit OwnRandomNumbers(uint64_t seed) : rng(torch::kCPU, 0), use(rng) { rng.reseed(seed); }
  DeviceRng rng;
  UseRng use;
};

}  // namespace lockstep::test
