// GradScaler: PyTorch's trajectory, what it does to losses, gradients and optimizers, what it
// refuses, and ranks that skip together.

#include "lockstep/grad_scaler.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp_nets.hpp"
#include "grad_scaler_golden.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/optim.hpp"
#include "precision/gradient_scan.hpp"
#include "rank_threads.hpp"
#include "support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::grad_scaler_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

torch::Tensor weight_of(std::vector<double> values) {
  return torch::tensor(values).to(torch::kFloat).requires_grad_();
}

// Scales a loss whose gradient with respect to `weight` is `slope` everywhere.
void backward(GradScaler& scaler, const torch::Tensor& weight, double slope) {
  scaler.scale((weight * slope).sum()).backward();
}

using Optimizers = std::vector<std::pair<std::string, MakeOptimizer>>;

Optimizers sgd_optimizers() {
  return {{"torch::optim::SGD",
           [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<torch::optim::SGD>(parameters, lr);
           }},
          {"lockstep::Sgd", [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<Sgd>(parameters, SgdOptions{.lr = lr});
           }}};
}

// With state of their own, which a skipped step must not touch either.
Optimizers optimizers_with_state() {
  return {{"torch::optim::AdamW",
           [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<torch::optim::AdamW>(parameters,
                                                          torch::optim::AdamWOptions(lr));
           }},
          {"lockstep::AdamW", [](std::vector<torch::Tensor> parameters, double lr) {
             return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = lr});
           }}};
}

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

// Misuse: one error for each illegal call, option and state.

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
  misused("unscale_() was called before any loss", [&] { scaler.unscale_(optimizer); });
  misused("step() was called before any loss", [&] { scaler.step(optimizer); });
  misused("update() was called before any loss", [&] { scaler.update(); });
  misused("update() was called before any loss", [&] { scaler.update(8); });
}

TEST_F(ScalerOrder, UnscaleOnceAndBeforeStep) {
  backward(scaler, weight, 1);
  scaler.unscale_(optimizer);
  misused("unscale_() was called a second time", [&] { scaler.unscale_(optimizer); });
  scaler.step(optimizer);
  misused("unscale_() was called after step()", [&] { scaler.unscale_(optimizer); });
  EXPECT_TRUE(torch::equal(weight, weight_of({0.5, 1.5}))) << "an error changed something";
}

TEST_F(ScalerOrder, StepOncePerUpdate) {
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  misused("step() was called a second time", [&] { scaler.step(optimizer); });
  scaler.update();
  scaler.step(optimizer);
  scaler.update();
}

TEST_F(ScalerOrder, UpdateNeedsAStep) {
  scaler.scale(weight.sum());
  misused("update() was called without a step()", [&] { scaler.update(); });
  backward(scaler, weight, 1);
  scaler.step(optimizer);
  scaler.update();
  misused("update() was called without a step()", [&] { scaler.update(); });
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

// Over ranks: a step that one rank cannot take is skipped on all.

class ScalerRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ScalerRanks, testing::Values(2, 3));

// The mean over the ranks carries what is not finite to all of them.
TEST_P(ScalerRanks, AnOverflowOnOneRankSkipsThatStepOnAll) {
  const int size = GetParam();
  for (const auto& [name, make] : optimizers_with_state()) {
    SCOPED_TRACE(name);
    run_ranks(size, [&make = make, size](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm);
      const auto optimizer = make(ddp.parameters(), 0.1);
      GradScaler scaler({.growth_interval = 2});
      scaler.name_parameters(*net);
      for (int step = 1; step <= 6; ++step) {
        const auto before = torch::nn::utils::parameters_to_vector(net->parameters()).clone();
        optimizer->zero_grad();
        auto loss = ddp(rows(4, 6, step + comm.rank())).square().mean();
        // A loss that only this rank's second layer makes infinite.
        if (step == 4 && comm.rank() == size - 1) {
          loss = loss + (net->second->bias * kInfinity).sum();
        }
        scaler.scale(loss).backward();
        scaler.step(*optimizer);
        scaler.update();
        const auto after = torch::nn::utils::parameters_to_vector(net->parameters());
        EXPECT_EQ(torch::equal(after, before), step == 4) << "step " << step;
      }
      const auto skipped = scaler.skipped_steps();
      ASSERT_EQ(skipped.size(), 1U);
      EXPECT_EQ(skipped[0].step, 4);
      EXPECT_EQ(skipped[0].parameter, "second.bias");
      EXPECT_EQ(skipped[0].scale_before, 131072);
      EXPECT_EQ(skipped[0].scale_after, 65536);
      EXPECT_EQ(scaler.get_scale(), 131072);
      ddp.check_replicas();
    });
  }
}

TEST_P(ScalerRanks, PartsOfOneModelSkipTogether) {
  const int size = GetParam();
  for (const bool by_hand : {false, true}) {
    for (const auto& [name, make] : optimizers_with_state()) {
      SCOPED_TRACE(name);
      run_ranks(size, [&make = make, size, by_hand](const Communicator& comm) {
        GradScaler scaler({.model_parallel = comm});
        const auto part = weight_of({1, 2});  // each rank's own
        const auto optimizer = make({part}, 0.1);
        for (int step = 1; step <= 4; ++step) {
          const auto before = part.detach().clone();
          part.mutable_grad().reset();
          const bool overflow = step == 2 && comm.rank() == size - 1;
          backward(scaler, part, overflow ? kInfinity : 0.5 + comm.rank());
          if (by_hand) scaler.unscale_(*optimizer);
          scaler.step(*optimizer);
          scaler.update();
          EXPECT_EQ(torch::equal(part, before), step == 2) << "step " << step;
        }
        EXPECT_EQ(scaler.get_scale(), 32768);
        EXPECT_EQ(scaler.skipped_steps().at(0).parameter,
                  comm.rank() == size - 1 ? "parameter 0 of group 0"
                                          : "a parameter of rank " + std::to_string(size - 1) +
                                                " of the model-parallel group");
      });
    }
  }
}

TEST_P(ScalerRanks, APartWithoutALossOrGradientsTakesPart) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    for (const auto& [name, make] : sgd_optimizers()) {
      GradScaler scaler({.model_parallel = comm});
      const auto part = weight_of({1});
      const auto optimizer = make({part}, 0.1);
      if (comm.rank() == 1) backward(scaler, part, kInfinity);
      scaler.step(*optimizer);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768) << name;
      if (comm.rank() == 1) backward(scaler, part, kInfinity);
      scaler.unscale_(*optimizer);
      scaler.update();  // without a step: the ranks agree here
      EXPECT_EQ(scaler.get_scale(), 16384) << name;
    }
  });
}

TEST_P(ScalerRanks, PartsOfOneModelAreClippedByTheNormOfTheWhole) {
  const int size = GetParam();
  std::vector<torch::Tensor> whole;
  for (int rank = 0; rank < size; ++rank) whole.push_back(weight_of({1, 2}));
  Sgd whole_optimizer(whole, {.lr = 1});
  auto loss = torch::zeros({});
  for (int rank = 0; rank < size; ++rank) {
    loss = loss + whole[static_cast<size_t>(rank)].sum() * (rank + 1);
  }
  loss.backward();
  whole_optimizer.step(StepExtras{.max_norm = 0.5});
  // A scaler that is switched off, as for bf16, still knows the other ranks.
  enum class Way { kStep, kUnscaleFirst, kDisabled };
  for (const Way way : {Way::kStep, Way::kUnscaleFirst, Way::kDisabled}) {
    run_ranks(size, [&](const Communicator& comm) {
      GradScaler scaler({.enabled = way != Way::kDisabled, .model_parallel = comm});
      const auto part = weight_of({1, 2});
      Sgd optimizer({part}, {.lr = 1});
      backward(scaler, part, comm.rank() + 1);
      if (way == Way::kUnscaleFirst) scaler.unscale_(optimizer);
      scaler.step(optimizer, {.max_norm = 0.5});
      scaler.update();
      expect_close(part.detach(), whole[static_cast<size_t>(comm.rank())].detach(), "part");
    });
  }
}

// The scan of gradients that a step needs: their norm, and the first that is not finite.

TEST(GradientScan, TheSameBitsForAnyNumberOfThreads) {
  torch::manual_seed(4);
  const std::vector<torch::Tensor> gradients = {torch::randn({301, 1003}), torch::Tensor(),
                                                torch::randn({5}), torch::randn({200'003})};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto alone = scan_gradients(gradients);
  at::set_num_threads(3);
  const auto together = scan_gradients(gradients);
  at::set_num_threads(threads);
  EXPECT_EQ(alone.sum_of_squares, together.sum_of_squares);
  double expected = 0;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) expected += gradient.to(torch::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(alone.sum_of_squares / expected, 1, 1e-12);
  EXPECT_EQ(alone.first_nonfinite, -1);
}

TEST(GradientScan, NamesTheFirstGradientThatIsNotFinite) {
  std::vector<torch::Tensor> gradients = {torch::ones({9}), torch::Tensor(), torch::ones({9000}),
                                          torch::ones({3}, torch::kHalf)};
  gradients[3][1] = kInfinity;
  EXPECT_EQ(scan_gradients(gradients).first_nonfinite, 3);
  gradients[2][8999] = kNan;
  EXPECT_EQ(scan_gradients(gradients).first_nonfinite, 2);
}

}  // namespace
}  // namespace lockstep::test::grad_scaler_test
