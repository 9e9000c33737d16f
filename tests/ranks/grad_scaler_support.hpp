#pragma once

// What the tests of GradScaler scale and step.

#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "grad_scaler_golden.hpp"
#include "lockstep/adam.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/sgd.hpp"

namespace lockstep::test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline torch::Tensor weight_of(std::vector<double> values) {
  return torch::tensor(values).to(torch::kFloat).requires_grad_();
}

/// Scales a loss whose gradient with respect to `weight` is `slope` everywhere.
inline void backward(GradScaler& scaler, const torch::Tensor& weight, double slope) {
  scaler.scale((weight * slope).sum()).backward();
}

using Optimizers = std::vector<std::pair<std::string, MakeOptimizer>>;

inline Optimizers sgd_optimizers() {
  return {{"torch::optim::SGD",
           [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<torch::optim::SGD>(parameters, lr);
           }},
          {"lockstep::Sgd", [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<Sgd>(parameters, SgdOptions{.lr = lr});
           }}};
}

/// With state of their own, which a skipped step must not touch either.
inline Optimizers optimizers_with_state() {
  return {{"torch::optim::AdamW",
           [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<torch::optim::AdamW>(parameters,
                                                          torch::optim::AdamWOptions(lr));
           }},
          {"lockstep::AdamW", [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = lr});
           }}};
}

}  // namespace lockstep::test
