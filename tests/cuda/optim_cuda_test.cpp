// lockstep's optimizers on a GPU against torch::optim there: the same weights, and decisions made
// on the device.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/adamw.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

using test::load;
using test::saved;
using torch::optim::Optimizer;
using Tensors = std::vector<torch::Tensor>;

class OptimCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
};

Tensors make_parameters() {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 3, 5, 17, 100003}) parameters.push_back(torch::randn({count}));
  parameters.push_back(torch::randn({7, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast));
  for (auto& parameter : parameters) parameter = parameter.to(torch::kCUDA).requires_grad_(true);
  return parameters;
}

void set_gradients(const Tensors& parameters, int step, double scale = 1) {
  torch::manual_seed(1000 + static_cast<uint64_t>(step));
  for (const auto& parameter : parameters) {
    torch::Tensor gradient = torch::empty_like(parameter);
    gradient.copy_(torch::randn(parameter.sizes()) * scale);
    parameter.mutable_grad() = gradient;
  }
}

void expect_same(const Tensors& actual, const Tensors& expected, const std::string& what) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = (actual[i] - expected[i]).detach().abs().max().item<double>();
    EXPECT_LE(difference, 1e-5 * expected[i].detach().abs().max().item<double>())
        << what << ", parameter " << i;
  }
}

struct Pair {
  std::string name;
  std::unique_ptr<Optimizer> ours;
  std::unique_ptr<Optimizer> theirs;

  FusedOptimizer& fused() { return dynamic_cast<FusedOptimizer&>(*ours); }
};

Pair sgd_pair(const Tensors& actual, const Tensors& expected, const SgdOptions& options) {
  return {"sgd", std::make_unique<Sgd>(actual, options),
          std::make_unique<torch::optim::SGD>(expected, torch::optim::SGDOptions(options.lr)
                                                            .momentum(options.momentum)
                                                            .dampening(options.dampening)
                                                            .weight_decay(options.weight_decay)
                                                            .nesterov(options.nesterov))};
}

Pair adamw_pair(const Tensors& actual, const Tensors& expected) {
  return {"adamw", std::make_unique<AdamW>(actual),
          std::make_unique<torch::optim::AdamW>(expected)};
}

// Each kind of update, over parameters of its own.
template <class Body>
void for_each_pair(Body&& body) {
  const std::vector<SgdOptions> kinds = {
      {.lr = 0.01},
      {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1},
      {.lr = 0.01, .momentum = 0.9, .nesterov = true},
  };
  for (size_t i = 0; i <= kinds.size(); ++i) {
    const Tensors actual = make_parameters();
    const Tensors expected = make_parameters();
    Pair pair =
        i < kinds.size() ? sgd_pair(actual, expected, kinds[i]) : adamw_pair(actual, expected);
    SCOPED_TRACE("kind " + std::to_string(i));
    body(pair, actual, expected);
  }
}

int64_t saved_step(const AdamW& optimizer, const torch::Tensor& parameter) {
  saved(optimizer);
  const auto& state =
      optimizer.state().at(compat::optimizer_state_key(parameter.unsafeGetTensorImpl()));
  return static_cast<const torch::optim::AdamWParamState&>(*state).step();
}

TEST_F(OptimCuda, FiftyStepsEqualTorch) {
  for_each_pair([](Pair& pair, const Tensors& actual, const Tensors& expected) {
    for (int step = 0; step < 50; ++step) {
      set_gradients(actual, step);
      set_gradients(expected, step);
      if (step % 2 == 1) {  // each counts its own steps
        actual[2].mutable_grad().reset();
        expected[2].mutable_grad().reset();
      }
      pair.ours->step();
      pair.theirs->step();
    }
    expect_same(actual, expected, pair.name);
  });
}

TEST_F(OptimCuda, TheFirstMomentumIsTheGradientDespiteDampening) {
  const Tensors actual = make_parameters();
  const Tensors expected = make_parameters();
  Pair pair = sgd_pair(actual, expected, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  for (int step = 0; step < 10; ++step) {
    set_gradients(actual, step);
    set_gradients(expected, step);
    pair.ours->step();
    pair.theirs->step();
  }
  expect_same(actual, expected, "dampening");

  // A first step that was skipped does not count.
  const Tensors others = make_parameters();
  Sgd fresh(others, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  ScaledGradients scaled;
  scaled.found_inf = torch::ones({}, torch::kCUDA);
  set_gradients(others, 99);
  fresh.step_fused(scaled, {});
  scaled.found_inf.zero_();
  for (int step = 0; step < 10; ++step) {
    set_gradients(others, step);
    fresh.step_fused(scaled, {});
  }
  expect_same(others, expected, "dampening, after a skipped step");
}

// The device alone decides: no value of found_inf is read on the host.
TEST_F(OptimCuda, FoundInfSkipsAndLeavesTheStepCountsAlone) {
  for_each_pair([](Pair& pair, const Tensors& actual, const Tensors& expected) {
    for (int step = 0; step < 10; ++step) {
      const bool overflow = step == 0 || step == 4;
      set_gradients(actual, step);
      if (overflow) actual[1].grad().fill_(std::numeric_limits<float>::infinity());
      ScaledGradients scaled;
      scaled.found_inf = torch::full({}, overflow ? 1.0F : 0.0F, torch::kCUDA);
      pair.fused().step_fused(scaled, {});
      if (overflow) continue;
      set_gradients(expected, step);
      pair.theirs->step();
    }
    expect_same(actual, expected, pair.name);
    if (auto* adamw = dynamic_cast<AdamW*>(pair.ours.get())) {
      EXPECT_EQ(saved_step(*adamw, actual[0]), 8);
    }
  });
}

TEST_F(OptimCuda, UnscalesAndClipsOnTheWay) {
  constexpr double kScale = 1024;
  for_each_pair([](Pair& pair, const Tensors& actual, const Tensors& expected) {
    for (int step = 0; step < 10; ++step) {
      set_gradients(actual, step, kScale);
      set_gradients(expected, step);
      ScaledGradients scaled;
      scaled.inverse_scale = 1 / kScale;
      pair.fused().step_fused(scaled, {.max_norm = 2.0});
      torch::nn::utils::clip_grad_norm_(expected, 2.0);
      pair.theirs->step();
    }
    expect_same(actual, expected, pair.name);
    for (size_t i = 0; i < actual.size(); ++i) {
      test::expect_close(actual[i].grad(), expected[i].grad(), "gradient left behind");
    }
  });
}

TEST_F(OptimCuda, ALooseBoundChangesNothingAndZeroGradDrops) {
  for_each_pair([](Pair& pair, const Tensors& actual, const Tensors& expected) {
    set_gradients(actual, 0);
    set_gradients(expected, 0);
    pair.fused().step_fused({}, {.max_norm = 1e6, .zero_grad = true});
    pair.theirs->step();
    expect_same(actual, expected, pair.name);
    for (const auto& parameter : actual) EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST_F(OptimCuda, StatesMoveBetweenOursAndTorchs) {
  for (const bool to_ours : {true, false}) {
    for_each_pair([&](Pair& pair, const Tensors& actual, const Tensors& expected) {
      // Both optimizers of the pair work on parameters of their own: copy the weights over, too.
      auto& first = to_ours ? *pair.theirs : *pair.ours;
      auto& second = to_ours ? *pair.ours : *pair.theirs;
      const Tensors& from = to_ours ? expected : actual;
      const Tensors& to = to_ours ? actual : expected;
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
      expect_same(to, from, pair.name + (to_ours ? " to ours" : " to torch's"));
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
    if (step == 5) ours->to(torch::kCUDA);
    if (step == 10) ours->to(torch::kCPU);
    set_gradients(ours->parameters(), step);
    set_gradients(theirs->parameters(), step);
    optimizer.step();
    reference.step();
  }
  expect_same(ours->parameters(), theirs->parameters(), "cpu, cuda, cpu");
}

TEST_F(OptimCuda, OneOptimizerForCpuAndGpuIsRefused) {
  const auto here = torch::ones({3}, torch::requires_grad());
  const auto there = torch::ones({3}, torch::device(torch::kCUDA)).requires_grad_(true);
  test::expect_error(Code::kPlacement, {"parameter 1 of group 0", "cuda", "cpu"}, [&] {
    Sgd optimizer({here, there});
  });
}

}  // namespace
}  // namespace lockstep
