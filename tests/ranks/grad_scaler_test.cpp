// GradScaler: PyTorch's trajectory, and what it does to losses, gradients and optimizers.

#include "lockstep/grad_scaler.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "grad_scaler_golden.hpp"
#include "grad_scaler_support.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

TEST(GradScaler, GoesWherePyTorchsGoes) {
  const auto golden = golden_scaler();
  ASSERT_GE(golden.at("cases").size(), 10U);
  for (const auto& [name, make] : sgd_optimizers()) {
    SCOPED_TRACE(name);
    for (const auto& one : golden.at("cases")) {
      play_golden_case(one, golden.at("learning_rate").get<double>(), torch::kCPU, make);
    }
  }
}

TEST(GradScaler, HasPyTorchsDefaults) {
  const GradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536);
  const auto state = *scaler.state_dict();
  EXPECT_EQ(state.growth_factor, 2);
  EXPECT_EQ(state.backoff_factor, 0.5);
  EXPECT_EQ(state.growth_interval, 2000);
  EXPECT_EQ(state.growth_tracker, 0);
}

TEST(GradScaler, DisabledPassesEverythingThrough) {
  for (const auto& [name, make] : sgd_optimizers()) {
    SCOPED_TRACE(name);
    GradScaler scaler({.enabled = false});
    const auto weight = weight_of({1, 2});
    const auto optimizer = make({weight}, 0.5);
    const auto loss = weight.sum();
    EXPECT_TRUE(scaler.scale(loss).is_same(loss));
    loss.backward();
    scaler.unscale_(*optimizer);
    scaler.step(*optimizer);
    scaler.update();
    EXPECT_TRUE(torch::equal(weight, weight_of({0.5, 1.5})));
    EXPECT_EQ(scaler.get_scale(), 1);
    EXPECT_FALSE(scaler.state_dict().has_value());
    scaler.load_state_dict({});
    EXPECT_TRUE(scaler.skipped_steps().empty());
  }
}

TEST(GradScaler, ASkippedStepTouchesNothingAndIsReported) {
  for (const auto& [name, make] : optimizers_with_state()) {
    SCOPED_TRACE(name);
    std::vector<SkippedStep> told;
    GradScaler scaler({.on_skip = [&](const SkippedStep& skipped) { told.push_back(skipped); }});
    TwoLayers net;
    TwoLayers never_overflowed;
    scaler.name_parameters(*net);
    const auto optimizer = make(net->parameters(), 0.1);
    const auto expected = make(never_overflowed->parameters(), 0.1);
    for (int step = 1; step <= 5; ++step) {
      const auto x = rows(4, 6, step);
      optimizer->zero_grad();
      scaler.scale(net(x).square().mean()).backward();
      if (step == 3) {
        net->second->weight.mutable_grad()[2][1] = kNan;
        net->second->bias.mutable_grad()[0] = kInfinity;
      }
      scaler.step(*optimizer);
      scaler.update();
      if (step == 3) continue;
      expected->zero_grad();
      never_overflowed(x).square().mean().backward();
      expected->step();
    }
    // The scale is a power of two: what is unscaled is what was never scaled, to the bit.
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(torch::equal(net->parameters()[i], never_overflowed->parameters()[i])) << i;
    }
    ASSERT_EQ(told.size(), 1U);
    EXPECT_EQ(told[0].step, 3);
    EXPECT_EQ(told[0].parameter, "second.weight");
    EXPECT_EQ(told[0].scale_before, 65536);
    EXPECT_EQ(told[0].scale_after, 32768);
    EXPECT_EQ(scaler.skipped_steps().size(), 1U);
  }
}

TEST(GradScaler, ParametersWithoutNamesAreCounted) {
  GradScaler scaler;
  const auto first = weight_of({1});
  const auto second = weight_of({1});
  const auto third = weight_of({1});
  torch::optim::SGD optimizer({torch::optim::OptimizerParamGroup({first}),
                               torch::optim::OptimizerParamGroup({second, third})},
                              torch::optim::SGDOptions(0.1));
  scaler.scale(first.sum() + third.sum() * kInfinity).backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.skipped_steps().at(0).parameter, "parameter 1 of group 1");
}

TEST(GradScaler, ClippingByHandWorksOnTrueGradients) {
  for (const auto& [name, make] : sgd_optimizers()) {
    SCOPED_TRACE(name);
    GradScaler scaler;
    const auto weight = weight_of({0, 0});
    const auto optimizer = make({weight}, 1);
    scaler.scale((weight * torch::tensor({3.0, 4.0})).sum()).backward();
    scaler.unscale_(*optimizer);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(weight, 1), 5, 1e-5);
    scaler.step(*optimizer);
    scaler.update();
    expect_close(weight.detach(), torch::tensor({-0.6, -0.8}).to(torch::kFloat), "weight");
  }
}

TEST(GradScaler, LockstepOptimizersClipAndClearInTheSamePass) {
  for (const bool by_hand : {false, true}) {
    GradScaler scaler;
    const auto weight = weight_of({0, 0});
    Sgd optimizer({weight}, {.lr = 1});
    scaler.scale((weight * torch::tensor({3.0, 4.0})).sum()).backward();
    if (by_hand) scaler.unscale_(optimizer);
    scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
    scaler.update();
    expect_close(weight.detach(), torch::tensor({-0.6, -0.8}).to(torch::kFloat), "weight");
    EXPECT_FALSE(weight.grad().defined());
    backward(scaler, weight, kNan);
    scaler.step(optimizer, {.zero_grad = true});
    scaler.update();
    EXPECT_FALSE(weight.grad().defined()) << "the next step would start from a NaN";
    EXPECT_EQ(scaler.skipped_steps().size(), 1U);
  }
}

TEST(GradScaler, AccumulatedGradientsAreThoseOfOneBatch) {
  for (const auto& [name, make] : sgd_optimizers()) {
    SCOPED_TRACE(name);
    TwoLayers whole;
    TwoLayers parts;
    const auto x = rows(12, 6, 0.3);
    GradScaler whole_scaler;
    GradScaler scaler;
    const auto whole_optimizer = make(whole->parameters(), 0.1);
    const auto optimizer = make(parts->parameters(), 0.1);
    whole_scaler.scale(whole(x).square().mean()).backward();
    whole_scaler.step(*whole_optimizer);
    for (const auto& part : x.chunk(4)) scaler.scale(parts(part).square().mean() / 4).backward();
    scaler.step(*optimizer);
    scaler.update();
    for (size_t i = 0; i < 4; ++i) {
      expect_close(parts->parameters()[i], whole->parameters()[i], std::to_string(i));
    }
  }
}

TEST(GradScaler, UnscalesGradientsOfAnyKind) {
  GradScaler scaler({.init_scale = 4});
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  const auto low = torch::ones({3}, torch::kBFloat16).requires_grad_();
  const auto wide = torch::ones({3}, torch::kDouble).requires_grad_();
  const auto strided = torch::ones({2, 3}).requires_grad_();
  const auto empty = torch::ones({0}).requires_grad_();
  torch::optim::SGD optimizer({table->weight, low, wide, strided, empty}, 1);
  scaler.scale(torch::ones({}));
  table(torch::tensor({1, 1})).sum().mul(4).backward();
  low.mutable_grad() = torch::full({3}, 12, torch::kBFloat16);
  wide.mutable_grad() = torch::full({3}, 12, torch::kDouble);
  strided.mutable_grad() = torch::full({2, 6}, 12.0).slice(1, 0, 6, 2);
  empty.mutable_grad() = torch::ones({0});
  scaler.unscale_(optimizer);
  EXPECT_TRUE(torch::equal(table->weight.grad().to_dense()[1], torch::full({2}, 2.0)));
  for (const auto& parameter : {low, wide, strided}) {
    EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 3)));
  }
  scaler.update();
  EXPECT_TRUE(scaler.skipped_steps().empty());
  strided.mutable_grad()[1][2] = kInfinity;
  scaler.unscale_(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.skipped_steps().at(0).parameter, "parameter 3 of group 0");
}

// As module.parameters() lists a weight that two layers share.
TEST(GradScaler, UnscalesAParameterThatIsListedTwiceOnce) {
  for (const auto& [name, make] : sgd_optimizers()) {
    GradScaler scaler;
    const auto weight = weight_of({0, 0});
    const auto optimizer = make({weight, weight}, 1);
    backward(scaler, weight, 3);
    scaler.unscale_(*optimizer);
    EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 3.0))) << name;
  }
}

TEST(GradScaler, LooksAtBothPartsOfAComplexGradient) {
  GradScaler scaler({.init_scale = 4});
  const auto weight = torch::ones({2}, torch::kComplexFloat).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1);
  scaler.scale(torch::ones({}));
  weight.mutable_grad() = torch::complex(torch::full({2}, 4.0), torch::full({2}, 8.0));
  scaler.step(optimizer);
  scaler.update();
  const auto stepped = torch::complex(torch::zeros({2}), torch::full({2}, -2.0));
  EXPECT_TRUE(torch::equal(weight.detach(), stepped)) << weight;
  weight.mutable_grad() = torch::complex(torch::ones({2}), torch::full({2}, kInfinity));
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(torch::equal(weight.detach(), stepped)) << weight;
  EXPECT_EQ(scaler.skipped_steps().size(), 1U);
}

TEST(GradScaler, AHalfLossIsScaledInFloat) {
  GradScaler scaler;
  const auto scaled = scaler.scale(torch::ones({}, torch::kHalf));
  EXPECT_EQ(scaled.scalar_type(), torch::kFloat) << "fp16 cannot hold 65536";
  EXPECT_EQ(scaled.item<float>(), 65536);
}

TEST(GradScaler, KeepsSmallGradientsThatHalfWouldLose) {
  const auto weight = weight_of({1});
  const auto gradient_of = [&](GradScaler& scaler) {
    weight.mutable_grad().reset();
    // A gradient that passes through fp16 on its way, as under Autocast.
    scaler.scale((weight.to(torch::kHalf).to(torch::kFloat) * 1e-8).sum()).backward();
    return weight.grad().item<float>();
  };
  GradScaler off({.enabled = false});
  EXPECT_EQ(gradient_of(off), 0);
  GradScaler on;
  EXPECT_NEAR(gradient_of(on) / 65536, 1e-8, 1e-11);
}

}  // namespace
}  // namespace lockstep::test
