// The scan of the gradients before an update: what is not finite skips the step, and the norm is
// the same every time.

#include <gtest/gtest.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA

#include <cmath>
#include <limits>

#include "fused_update_support.hpp"
#include "lockstep/adam.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/sgd.hpp"

namespace lockstep::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST_F(FusedUpdate, ThousandsOfGradientsAreScannedTogether) {
  const auto weights = torch::zeros({2300, 4}, kGpu);
  const auto gradients = torch::ones({2300, 4}, kGpu);
  Tensors parameters;
  for (int64_t i = 0; i < 2300; ++i) {
    parameters.push_back(weights[i].narrow(0, 0, 3).detach().requires_grad_(true));
    parameters.back().mutable_grad() = gradients[i].narrow(0, 0, 3).detach();
  }
  Sgd optimizer(parameters, {.lr = 1});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, kGpu));
  scaler.step(optimizer, {.max_norm = 1.0});
  scaler.update();
  const double expected = -1 / std::sqrt(3.0 * 2300);
  EXPECT_NEAR(parameters[2299][2].item<double>(), expected, 1e-6);
  parameters[2250].mutable_grad()[1] = kNan;
  parameters[2290].mutable_grad()[0] = kInfinity;
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.skipped_steps().at(0).parameter, "parameter 2250 of group 0");
}

// One bad element, wherever it stands, stops the whole step, and the parameter is named.
TEST_F(FusedUpdate, ABadElementAnywhereSkipsTheStep) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
    const Tensors parameters = chunky_parameters(kGpu, dtype);
    Tensors before;
    for (const auto& parameter : parameters) before.push_back(parameter.detach().clone());
    AdamW optimizer(parameters);
    GradScaler scaler;
    scaler.scale(torch::ones({}, kGpu));
    size_t skips = 0;
    for (const size_t tensor : {size_t{0}, size_t{1}, size_t{4}, size_t{6}, size_t{7}}) {
      const int64_t count = parameters[tensor].numel();
      for (const int64_t at : {int64_t{0}, count / 2, count - 1}) {
        for (const double bad : {kInfinity, -kInfinity, kNan}) {
          set_gradients(parameters, 0);
          parameters[tensor].mutable_grad()[at] = bad;
          scaler.step(optimizer);
          scaler.update();
          ASSERT_EQ(scaler.skipped_steps().size(), ++skips);
          EXPECT_EQ(scaler.skipped_steps().back().parameter,
                    "parameter " + std::to_string(tensor) + " of group 0");
          EXPECT_EQ(scaler.skipped_steps().back().step, static_cast<int64_t>(skips));
        }
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(torch::equal(parameters[i], before[i])) << i;
    }
  }
}

TEST_F(FusedUpdate, LargeDoublesAreFiniteThoughTheirSquaresAreNot) {
  const auto weight = torch::zeros({5}, torch::device(kGpu).dtype(torch::kFloat64));
  const auto parameter = weight.requires_grad_(true);
  Sgd optimizer({parameter}, {.lr = 1e-200});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, kGpu));
  parameter.mutable_grad() = torch::full_like(parameter, 1e200);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(scaler.skipped_steps().empty());
  EXPECT_NEAR(parameter[3].item<double>(), -1, 1e-12);
}

TEST_F(FusedUpdate, TheSameNormEveryTime) {
  Tensors results;
  for (int run = 0; run < 3; ++run) {
    const Tensors parameters = {torch::zeros({3'000'017}, kGpu).requires_grad_(true)};
    Sgd optimizer(parameters, {.lr = 1});
    set_gradients(parameters, 0);
    optimizer.step({.max_norm = 1.0});
    results.push_back(parameters[0].detach());
  }
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_TRUE(torch::equal(results[0], results[2]));
  EXPECT_NEAR(results[0].norm().item<double>(), 1, 1e-5);
}

}  // namespace
}  // namespace lockstep::test

#endif
