#pragma once

// What the tests of the update kernels update.

#include "gpu_test.hpp"
#include "optim_support.hpp"

namespace lockstep::test {

using FusedUpdate = GpuTest;

/// Shorter than a pack, tails, more than a chunk, nothing; the last begins one element behind a
/// boundary.
inline Tensors chunky_parameters(torch::Device device, torch::ScalarType dtype) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 7, 1023, 4096, 4097, 0, 20000}) {
    parameters.push_back(torch::randn({count}).to(device, dtype));
  }
  parameters.push_back(torch::randn({9001}).to(device, dtype).slice(0, 1));
  for (auto& parameter : parameters) parameter = parameter.detach().requires_grad_(true);
  return parameters;
}

inline std::vector<OptimizerPair> sgd_kinds() {
  return {
      sgd_pair("plain", {.lr = 0.01, .weight_decay = 0.1}),
      sgd_pair("dampening", {.lr = 0.01, .momentum = 0.9, .dampening = 0.3}),
      sgd_pair("nesterov", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true})};
}

inline std::vector<OptimizerPair> all_kinds() {
  auto kinds = sgd_kinds();
  kinds.push_back(adamw_pair("adamw", {.lr = 0.01}));
  kinds.push_back(adam_pair("adam", {.lr = 0.01, .weight_decay = 0.1}));
  return kinds;
}

}  // namespace lockstep::test
