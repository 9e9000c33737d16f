// What GradScaler refuses: one error per illegal move, options and states that cannot be.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "grad_scaler_support.hpp"
#include "lockstep/grad_scaler.hpp"
#include "support.hpp"

namespace lockstep::test {
namespace {

class ScalerOrder : public testing::Test {
 protected:
  void misused(const std::string& what, const std::function<void()>& call) {
    expect_error(Code::kScalerMisuse, {what}, call);
  }

  GradScaler scaler;
  torch::Tensor weight = weight_of({1, 2});
  torch::optim::SGD optimizer{{weight}, 0.5};
};

TEST_F(ScalerOrder, NothingBeforeALossIsScaled) {
  misused("unscale_() before any loss", [&] { scaler.unscale_(optimizer); });
  misused("step() before any loss", [&] { scaler.step(optimizer); });
  misused("update() before any loss", [&] { scaler.update(); });
  misused("update() before any loss", [&] { scaler.update(8); });
}

TEST_F(ScalerOrder, UnscaleOnceAndBeforeStep) {
  backward(scaler, weight, 1);
  scaler.unscale_(optimizer);
  misused("unscale_() a second time", [&] { scaler.unscale_(optimizer); });
  scaler.step(optimizer);
  misused("unscale_() after step()", [&] { scaler.unscale_(optimizer); });
  EXPECT_TRUE(torch::equal(weight, weight_of({0.5, 1.5}))) << "an error changed something";
}

TEST_F(ScalerOrder, StepOncePerUpdate) {
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  misused("step() a second time", [&] { scaler.step(optimizer); });
  scaler.update();
  scaler.step(optimizer);
  scaler.update();
}

TEST_F(ScalerOrder, UpdateNeedsAStep) {
  scaler.scale(weight.sum());
  misused("update() without a step()", [&] { scaler.update(); });
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  scaler.update();
  misused("update() without a step()", [&] { scaler.update(); });
  scaler.update(8.0);  // needs none, as in PyTorch
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST_F(ScalerOrder, AnOptimizerWithoutGradientsIsRefusedAndCanTryAgain) {
  scaler.scale(weight.sum());
  misused("no parameter of this optimizer has a gradient", [&] { scaler.step(optimizer); });
  misused("no parameter of this optimizer has a gradient", [&] { scaler.unscale_(optimizer); });
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  scaler.update();
}

TEST_F(ScalerOrder, UnscaledGradientsCountWithoutAStep) {
  backward(scaler, weight, kInfinity);
  scaler.unscale_(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, RefusesOptionsThatCannotWork) {
  const auto refused = [](const std::string& what, const GradScalerOptions& options) {
    expect_error(Code::kUsage, {what}, [&] { const GradScaler scaler(options); });
  };
  for (const double scale : {0.0, -1.0, kInfinity, kNan, 1e39, 1e-60}) {
    refused("cannot be a scale", {.init_scale = scale});
  }
  for (const double factor : {1.0, 0.5, kInfinity, kNan}) {
    refused("does not grow", {.growth_factor = factor});
  }
  for (const double factor : {1.0, 2.0, 0.0, -0.5, kNan}) {
    refused("does not shrink", {.backoff_factor = factor});
  }
  refused("growth interval of 0", {.growth_interval = 0});
}

TEST(GradScaler, RefusesADamagedStateAndKeepsItsOwn) {
  GradScaler scaler;
  const auto good = *scaler.state_dict();
  const auto refused = [&](const std::string& what,
                           const std::function<void(GradScalerState&)>& damage) {
    auto state = good;
    damage(state);
    expect_error(Code::kUsage, {what}, [&] { scaler.load_state_dict(state); });
  };
  refused("cannot be a scale", [](auto& state) { state.scale = kNan; });
  refused("does not grow", [](auto& state) { state.growth_factor = 0; });
  refused("does not shrink", [](auto& state) { state.backoff_factor = 0; });
  refused("growth interval", [](auto& state) { state.growth_interval = -3; });
  refused("finite steps counted", [](auto& state) { state.growth_tracker = 2000; });
  refused("cannot be a scale", [](auto& state) { state = {}; });
  EXPECT_EQ(scaler.get_scale(), 65536);
  expect_error(Code::kUsage, {"cannot be a scale"}, [&] {
    scaler.scale(torch::ones({}));
    scaler.update(-1);
  });
}

TEST(GradScaler, RefusesHalfGradientsByName) {
  GradScaler scaler;
  torch::nn::Linear net(2, 2);
  net->to(torch::kHalf);
  scaler.name_parameters(*net);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  scaler.scale(torch::ones({}));
  net->bias.mutable_grad() = torch::ones({2}, torch::kHalf);
  expect_error(Code::kTensorMismatch, {"bias has fp16 gradients", "fp32", "Autocast"},
               [&] { scaler.step(optimizer); });
}

TEST(GradScaler, ExtrasNeedALockstepOptimizer) {
  GradScaler scaler;
  const auto weight = weight_of({0});
  torch::optim::SGD optimizer({weight}, 1);
  backward(scaler, weight, 1);
  for (const StepExtras& extras : {StepExtras{.max_norm = 1.0}, StepExtras{.zero_grad = true}}) {
    expect_error(Code::kUsage, {"lockstep::Sgd", "clip_grad_norm_"},
                 [&] { scaler.step(optimizer, extras); });
  }
  scaler.step(optimizer);
  EXPECT_EQ(weight.item<float>(), -1);
}

}  // namespace
}  // namespace lockstep::test
