// lockstep's optimizers on a GPU against torch::optim there: the same weights, and decisions made
// on the device.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "gpu_test.hpp"
#include "lockstep/optim.hpp"
#include "optim_support.hpp"
#include "tensor_support.hpp"
#include "torch_compat.hpp"

namespace lockstep::test::optim_cuda_test {
namespace {

using OptimCuda = GpuTest;

constexpr double kTolerance = 1e-5;

Tensors make_parameters() {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 3, 5, 17, 100003}) parameters.push_back(torch::randn({count}));
  parameters.push_back(torch::randn({7, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  for (auto& parameter : parameters) parameter = parameter.to(kGpu).requires_grad_(true);
  return parameters;
}

// Each kind of update, over parameters of its own.
template <class Body>
void for_each_kind(Body&& body) {
  for (const auto& pair :
       {sgd_pair("plain", {.lr = 0.01}),
        sgd_pair("momentum", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1}),
        sgd_pair("nesterov", {.lr = 0.01, .momentum = 0.9, .nesterov = true}),
        adamw_pair("adamw", {}), adam_pair("adam", {.lr = 0.01, .weight_decay = 0.1})}) {
    SCOPED_TRACE(pair.name);
    body(SideBySide(pair, make_parameters));
  }
}

int64_t saved_step(const AdamW& optimizer, const torch::Tensor& parameter) {
  saved(optimizer);
  const auto& state =
      optimizer.state().at(compat::optimizer_state_key(parameter.unsafeGetTensorImpl()));
  return static_cast<const torch::optim::AdamWParamState&>(*state).step();
}

TEST_F(OptimCuda, FiftyStepsEqualTorch) {
  for_each_kind([](const SideBySide& both) {
    for (int step = 0; step < 50; ++step) {
      both.set_gradients(step);
      if (step % 2 == 1) {  // each counts its own steps
        both.actual[2].mutable_grad().reset();
        both.expected[2].mutable_grad().reset();
      }
      both.ours->step();
      both.theirs->step();
    }
    both.expect_equal(kTolerance);
  });
}

TEST_F(OptimCuda, TheFirstMomentumIsTheGradientDespiteDampening) {
  const SgdOptions options = {.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
  const SideBySide both(sgd_pair("dampening", options), make_parameters);
  both.steps(0, 9);
  both.expect_equal(kTolerance);

  // A first step that was skipped does not count.
  const Tensors others = make_parameters();
  Sgd fresh(others, options);
  ScaledGradients scaled;
  scaled.found_inf = torch::ones({}, kGpu);
  set_gradients(others, 99);
  fresh.step_fused(scaled, {});
  scaled.found_inf.zero_();
  for (int step = 0; step < 10; ++step) {
    set_gradients(others, step);
    fresh.step_fused(scaled, {});
  }
  expect_near(others, both.expected, kTolerance, "dampening, after a skipped step");
}

// The device alone decides: no value of found_inf is read on the host.
TEST_F(OptimCuda, FoundInfSkipsAndLeavesTheStepCountsAlone) {
  for_each_kind([](const SideBySide& both) {
    for (int step = 0; step < 10; ++step) {
      const bool overflow = step == 0 || step == 4;
      set_gradients(both.actual, step);
      if (overflow) both.actual[1].grad().fill_(std::numeric_limits<float>::infinity());
      ScaledGradients scaled;
      scaled.found_inf = torch::full({}, overflow ? 1.0F : 0.0F, kGpu);
      fused(*both.ours).step_fused(scaled, {});
      if (overflow) continue;
      set_gradients(both.expected, step);
      both.theirs->step();
    }
    both.expect_equal(kTolerance);
    if (auto* adamw = dynamic_cast<AdamW*>(both.ours.get())) {
      EXPECT_EQ(saved_step(*adamw, both.actual[0]), 8);
    }
  });
}

TEST_F(OptimCuda, UnscalesAndClipsOnTheWay) {
  constexpr double kScale = 1024;
  for_each_kind([](const SideBySide& both) {
    for (int step = 0; step < 10; ++step) {
      set_gradients(both.actual, step, kScale);
      set_gradients(both.expected, step);
      ScaledGradients scaled;
      scaled.inverse_scale = 1 / kScale;
      fused(*both.ours).step_fused(scaled, {.max_norm = 2.0});
      torch::nn::utils::clip_grad_norm_(both.expected, 2.0);
      both.theirs->step();
    }
    both.expect_equal(kTolerance);
    for (size_t i = 0; i < both.actual.size(); ++i) {
      expect_close(both.actual[i].grad(), both.expected[i].grad(), "gradient left behind");
    }
  });
}

TEST_F(OptimCuda, ALooseBoundChangesNothingAndZeroGradDrops) {
  for_each_kind([](const SideBySide& both) {
    both.set_gradients(0);
    fused(*both.ours).step_fused({}, {.max_norm = 1e6, .zero_grad = true});
    both.theirs->step();
    both.expect_equal(kTolerance);
    for (const auto& parameter : both.actual) EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST_F(OptimCuda, StatesMoveBetweenOursAndTorchs) {
  for (const bool to_ours : {true, false}) {
    for_each_kind([&](const SideBySide& both) {
      // Both optimizers of the pair work on parameters of their own: copy the weights over, too.
      auto& first = to_ours ? *both.theirs : *both.ours;
      auto& second = to_ours ? *both.ours : *both.theirs;
      const Tensors& from = to_ours ? both.expected : both.actual;
      const Tensors& to = to_ours ? both.actual : both.expected;
      for (int step = 0; step < 5; ++step) {
        set_gradients(from, step);
        first.step();
      }
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      }
      load(second, saved(first));
      for (int step = 5; step < 15; ++step) {
        set_gradients(from, step);
        set_gradients(to, step);
        first.step();
        second.step();
      }
      expect_near(to, from, kTolerance, both.name + (to_ours ? " to ours" : " to torch's"));
    });
  }
}

TEST_F(OptimCuda, AModelMayMoveAndItsStateFollows) {
  torch::manual_seed(5);
  torch::nn::Linear ours(17, 9);
  torch::nn::Linear theirs(17, 9);
  {
    const torch::NoGradGuard no_grad;
    theirs->weight.copy_(ours->weight);
    theirs->bias.copy_(ours->bias);
  }
  AdamW optimizer(ours->parameters());
  torch::optim::AdamW reference(theirs->parameters());
  for (int step = 0; step < 15; ++step) {
    if (step == 5) ours->to(kGpu);
    if (step == 10) ours->to(torch::kCPU);
    set_gradients(ours->parameters(), step);
    set_gradients(theirs->parameters(), step);
    optimizer.step();
    reference.step();
  }
  expect_near(ours->parameters(), theirs->parameters(), kTolerance, "cpu, cuda, cpu");
}

TEST_F(OptimCuda, OneOptimizerForCpuAndGpuIsRefused) {
  const auto here = torch::ones({3}, torch::requires_grad());
  const auto there = torch::ones({3}, torch::device(kGpu)).requires_grad_(true);
  expect_error(Code::kPlacement, {"parameter 1 of group 0", "cuda", "cpu"}, [&] {
    Sgd optimizer({here, there});
  });
}

}  // namespace
}  // namespace lockstep::test::optim_cuda_test
