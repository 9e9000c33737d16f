#pragma once

// What the tests of lockstep's optimizers on the CPU update, and how.

#include <initializer_list>
#include <stdexcept>

#include "optim_support.hpp"

namespace lockstep::test {

constexpr int64_t kMillion = 1'000'003;

/// Odd sizes: shorter than a vector, one more than many, and with `longest` one that several
/// threads share.
inline Tensors odd_parameters(torch::ScalarType dtype = torch::kFloat32, int64_t longest = 0) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 3, 5, 17, 4099}) parameters.push_back(torch::randn({count}));
  parameters.push_back(torch::randn({}));
  parameters.push_back(torch::randn({7, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  parameters.push_back(torch::randn({13, 6}).t());
  parameters.push_back(torch::randn({0, 4}));
  if (longest > 0) parameters.push_back(torch::randn({longest}));
  for (auto& parameter : parameters) {
    parameter = parameter.detach().to(dtype).requires_grad_(true);
  }
  return parameters;
}

inline std::vector<OptimizerPair> all_pairs() {
  return {
      sgd_pair("plain", {.lr = 0.01}),
      sgd_pair("decay", {.lr = 0.01, .weight_decay = 0.1}),
      sgd_pair("momentum", {.lr = 0.01, .momentum = 0.9}),
      sgd_pair("dampening", {.lr = 0.01, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}),
      sgd_pair("nesterov", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}),
      adamw_pair("adamw", {}),
      adamw_pair("adamw, other numbers",
                 {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.3}),
      adamw_pair("adamw, no decay", {.lr = 0.01, .weight_decay = 0}),
      adam_pair("adam", {}),
      adam_pair("adam, other numbers",
                {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.3}),
  };
}

/// Those of all_pairs().
inline std::vector<OptimizerPair> pairs_named(std::initializer_list<std::string> names) {
  std::vector<OptimizerPair> chosen;
  for (const auto& name : names) {
    for (const auto& pair : all_pairs()) {
      if (pair.name == name) chosen.push_back(pair);
    }
  }
  if (chosen.size() != names.size()) throw std::invalid_argument("no such kind of update");
  return chosen;
}

/// Both optimizers over odd parameters.
inline SideBySide side_by_side(const OptimizerPair& pair, torch::ScalarType dtype = torch::kFloat32,
                               int64_t longest = 0) {
  return {pair, [=] { return odd_parameters(dtype, longest); }};
}

}  // namespace lockstep::test
