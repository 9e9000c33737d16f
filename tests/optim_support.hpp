#pragma once

// lockstep's optimizers beside torch's, on any device.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim.hpp"

namespace lockstep::test {

using Tensors = std::vector<torch::Tensor>;

/// Gradients of one step: the same for the same step on every device, in memory as the parameters
/// are, which are dense.
inline void set_gradients(const Tensors& parameters, int step, double scale = 1) {
  torch::manual_seed(1000 + static_cast<uint64_t>(step));
  for (const auto& parameter : parameters) {
    const int64_t offset = parameter.storage_offset();
    const auto gradient = torch::empty({offset + parameter.numel()}, parameter.options())
                              .as_strided(parameter.sizes(), parameter.strides(), offset);
    gradient.copy_(torch::randn(parameter.sizes()) * scale);
    parameter.mutable_grad() = gradient.detach();  // to autograd no view
  }
}

/// No element is further from its peer than `tolerance` times the longest of its tensor, or times
/// `at_least` where all are shorter.
inline void expect_near(const Tensors& actual, const Tensors& expected, double tolerance,
                        const std::string& what, double at_least = 0) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i].numel() == 0) continue;
    const auto theirs = expected[i].detach().to(actual[i].device(), torch::kFloat64);
    const auto difference = (actual[i].detach().to(torch::kFloat64) - theirs).abs();
    EXPECT_LE(difference.max().item<double>(),
              tolerance * std::max(at_least, theirs.abs().max().item<double>()))
        << what << ", tensor " << i;
  }
}

inline FusedOptimizer& fused(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<FusedOptimizer&>(optimizer);
}

/// One kind of update as lockstep does it and as torch does.
struct OptimizerPair {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;
  std::string name;
  Make ours;
  Make theirs;
};

inline OptimizerPair sgd_pair(const std::string& name, const SgdOptions& options) {
  const auto theirs = torch::optim::SGDOptions(options.lr)
                          .momentum(options.momentum)
                          .dampening(options.dampening)
                          .weight_decay(options.weight_decay)
                          .nesterov(options.nesterov);
  return {name, [=](const Tensors& p) { return std::make_unique<Sgd>(p, options); },
          [=](const Tensors& p) { return std::make_unique<torch::optim::SGD>(p, theirs); }};
}

inline OptimizerPair adamw_pair(const std::string& name, const AdamWOptions& options) {
  const auto theirs = torch::optim::AdamWOptions(options.lr)
                          .betas({options.beta1, options.beta2})
                          .eps(options.eps)
                          .weight_decay(options.weight_decay);
  return {name, [=](const Tensors& p) { return std::make_unique<AdamW>(p, options); },
          [=](const Tensors& p) { return std::make_unique<torch::optim::AdamW>(p, theirs); }};
}

inline OptimizerPair adam_pair(const std::string& name, const AdamOptions& options) {
  const auto theirs = torch::optim::AdamOptions(options.lr)
                          .betas({options.beta1, options.beta2})
                          .eps(options.eps)
                          .weight_decay(options.weight_decay);
  return {name, [=](const Tensors& p) { return std::make_unique<Adam>(p, options); },
          [=](const Tensors& p) { return std::make_unique<torch::optim::Adam>(p, theirs); }};
}

/// The same parameters twice: lockstep's optimizer updates `actual`, torch's `expected`.
struct SideBySide {
  /// `make` gives equal parameters in every call.
  SideBySide(const OptimizerPair& pair, const std::function<Tensors()>& make)
      : name(pair.name),
        actual(make()),
        expected(make()),
        ours(pair.ours(actual)),
        theirs(pair.theirs(expected)) {}

  void set_gradients(int step) const {
    test::set_gradients(actual, step);
    test::set_gradients(expected, step);
  }

  /// Steps `first` to `last` of both, each on gradients of its own.
  void steps(int first, int last) const {
    for (int step = first; step <= last; ++step) {
      set_gradients(step);
      ours->step();
      theirs->step();
    }
  }

  void expect_equal(double tolerance, double at_least = 0) const {
    expect_near(actual, expected, tolerance, name, at_least);
  }

  std::string name;
  Tensors actual;
  Tensors expected;
  std::unique_ptr<torch::optim::Optimizer> ours;
  std::unique_ptr<torch::optim::Optimizer> theirs;
};

}  // namespace lockstep::test
