#pragma once

// Master weights beside float32 weights, on any device.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/master_weights.hpp"
#include "optim_support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {

using MakeNet = std::function<torch::nn::Sequential()>;
using MakeWithMasters = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const Tensors&, std::optional<MasterWeights>)>;

inline std::vector<std::pair<std::string, MakeWithMasters>> master_optimizers() {
  return {{"sgd",
           [](const Tensors& parameters, auto masters) {
             return std::make_unique<Sgd>(
                 parameters, SgdOptions{.lr = 0.01, .momentum = 0.9, .masters = masters});
           }},
          {"adamw", [](const Tensors& parameters, auto masters) {
             return std::make_unique<AdamW>(parameters,
                                            AdamWOptions{.lr = 0.01, .masters = masters});
           }}};
}

/// A net of low precision with masters, and the same net in float32, each with its optimizer.
struct LowAndFull {
  LowAndFull(const MakeNet& make_net, torch::ScalarType dtype, const MakeWithMasters& make)
      : low(make_net()),
        full(make_net()),
        masters(*low, {.dtype = dtype}),
        ours(make(low->parameters(), masters)),
        expected(make(full->parameters(), std::nullopt)) {}

  /// Sets the gradients of the low net; copy_gradients() gives the full net the same, rounded.
  void set_gradients(int step, double scale = 1) const {
    test::set_gradients(low->parameters(), step, scale);
  }
  void copy_gradients() const {
    const auto from = low->parameters();
    for (size_t i = 0; i < from.size(); ++i) {
      // A copy always: clipping writes to gradients that are kept.
      full->parameters()[i].mutable_grad() =
          from[i].grad().to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true);
    }
  }

  /// The masters have walked as float32 did, to the bit.
  void expect_masters_as_full() const {
    for (size_t i = 0; i < full->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(masters.of(low->parameters()[i]), full->parameters()[i])) << i;
    }
  }

  /// Each parameter is its master, rounded.
  void expect_parameters_rounded() const {
    for (const auto& parameter : low->parameters()) {
      EXPECT_TRUE(torch::equal(parameter, masters.of(parameter).to(parameter.dtype())));
    }
  }

  torch::nn::Sequential low;
  torch::nn::Sequential full;
  MasterWeights masters;
  std::unique_ptr<torch::optim::Optimizer> ours;
  std::unique_ptr<torch::optim::Optimizer> expected;
};

/// Twenty steps of both nets, some clipped, some clearing the gradients.
inline void check_masters_walk_as_float32(const MakeNet& make_net) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& [name, make] : master_optimizers()) {
      SCOPED_TRACE(name);
      const LowAndFull both(make_net, dtype, make);
      for (int step = 0; step < 20; ++step) {
        both.set_gradients(step);
        both.copy_gradients();
        const StepExtras extras = {.max_norm = step % 3 == 0 ? std::optional(1.0) : std::nullopt,
                                   .zero_grad = step % 2 == 0};
        fused(*both.ours).step_fused({}, extras);
        fused(*both.expected).step_fused({}, extras);
        EXPECT_EQ(both.low->parameters()[0].grad().defined(), step % 2 != 0);
      }
      both.expect_masters_as_full();
      both.expect_parameters_rounded();
    }
  }
}

/// A second net and optimizer that take over half-way end with the bits of the first. The nets go
/// to the device when they have masters.
inline void check_saved_optimizer_goes_on(const MakeNet& make_net, const MakeWithMasters& make,
                                          torch::Device device) {
  auto whole = make_net();
  auto resumed = make_net();
  const MasterWeights whole_masters(*whole);
  const MasterWeights resumed_masters(*resumed);
  whole->to(device);  // the masters follow
  resumed->to(device);
  const auto first = make(whole->parameters(), whole_masters);
  const auto second = make(resumed->parameters(), resumed_masters);
  for (int step = 0; step < 10; ++step) {
    if (step == 5) {
      // The module's own weights come from its file; norms have no master.
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < whole->parameters().size(); ++i) {
        resumed->parameters()[i].copy_(whole->parameters()[i]);
      }
      load(*second, saved(*first));
    }
    set_gradients(whole->parameters(), step);
    first->step();
    if (step < 5) continue;
    set_gradients(resumed->parameters(), step);
    second->step();
  }
  for (size_t i = 0; i < whole->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(resumed_masters.of(resumed->parameters()[i]),
                             whole_masters.of(whole->parameters()[i])))
        << i;
  }
}

}  // namespace lockstep::test
