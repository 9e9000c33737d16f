// Autocast: what computes in which precision, and that nothing of it outlives the guard.

#include "lockstep/autocast.hpp"

#include <thread>

#include "lockstep/data_parallel.hpp"
#include "nets.hpp"
#include "tensor_support.hpp"
#include "torch_compat.hpp"

namespace lockstep::test::autocast_test {
namespace {

const torch::Device kCpu(torch::kCPU);

torch::ScalarType product_dtype() {
  return torch::mm(torch::ones({4, 4}), torch::ones({4, 4})).scalar_type();
}

TEST(Autocast, LowersProductsAndKeepsLossesAsPyTorchDoesOnTheCpu) {
  const auto x = torch::randn({4, 4});
  EXPECT_EQ(product_dtype(), torch::kFloat);
  {
    const Autocast amp(kCpu, torch::kBFloat16);
    EXPECT_EQ(product_dtype(), torch::kBFloat16);
    EXPECT_EQ(torch::linear(x, x).scalar_type(), torch::kBFloat16);
    const auto low = torch::mm(x, x);
    EXPECT_EQ(low.softmax(1).scalar_type(), torch::kBFloat16) << "fp32 on a GPU, not here";
    EXPECT_EQ(torch::mse_loss(low, x).scalar_type(), torch::kFloat);
    EXPECT_EQ(torch::cross_entropy_loss(low, torch::zeros({4}, torch::kLong)).scalar_type(),
              torch::kFloat);
    EXPECT_EQ(torch::mm(x.to(torch::kDouble), x.to(torch::kDouble)).scalar_type(), torch::kDouble);
  }
  EXPECT_EQ(product_dtype(), torch::kFloat);
}

TEST(Autocast, GradientsHaveTheDtypeOfTheWeights) {
  torch::nn::Linear net(4, 2);
  torch::Tensor loss;
  {
    const Autocast amp(kCpu, torch::kBFloat16);
    loss = net(torch::ones({3, 4})).sum();
  }
  loss.backward();
  EXPECT_EQ(net->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({2, 4}, 3.0)));
}

TEST(Autocast, NestsAndAnInnerGuardCanAskForFullPrecision) {
  const Autocast outer(kCpu, torch::kBFloat16);
  {
    const Autocast off(kCpu, torch::kBFloat16, false);
    EXPECT_EQ(product_dtype(), torch::kFloat);
    {
      const Autocast on(kCpu, torch::kBFloat16);
      EXPECT_EQ(product_dtype(), torch::kBFloat16);
    }
    EXPECT_EQ(product_dtype(), torch::kFloat);
  }
  EXPECT_EQ(product_dtype(), torch::kBFloat16);
}

TEST(Autocast, RestoresFlagDtypeAndCacheAlsoOnAnException) {
  const auto before = compat::AutocastSwitch::get(torch::kCPU);
  at::autocast::set_autocast_cache_enabled(false);
  EXPECT_THROW(
      {
        const Autocast amp(kCpu, torch::kBFloat16);
        at::autocast::set_autocast_cache_enabled(true);
        torch::mm(torch::ones({2, 3}), torch::ones({2, 3}));
      },
      c10::Error);
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  at::autocast::set_autocast_cache_enabled(true);
  EXPECT_EQ(compat::AutocastSwitch::get(torch::kCPU).enabled, before.enabled);
  EXPECT_EQ(compat::AutocastSwitch::get(torch::kCPU).dtype, before.dtype);
  EXPECT_EQ(product_dtype(), torch::kFloat);
  EXPECT_EQ(at::autocast::increment_nesting(), 1) << "the guard left its nesting behind";
  at::autocast::decrement_nesting();
}

TEST(Autocast, HoldsForItsOwnThreadOnly) {
  const Autocast amp(kCpu, torch::kBFloat16);
  torch::ScalarType elsewhere = torch::kBFloat16;
  std::thread([&] {
    elsewhere = product_dtype();
    const Autocast theirs(kCpu, torch::kBFloat16);
  }).join();
  EXPECT_EQ(elsewhere, torch::kFloat);
  EXPECT_EQ(product_dtype(), torch::kBFloat16) << "another thread's guard ended this one";
}

// See the class comment: weights are converted once.
TEST(Autocast, KeepsCastsOfWeightsUntilTheOutermostGuardEnds) {
  const auto weight = torch::ones({1, 4}).requires_grad_();
  const auto set = [&](double value) {
    const torch::NoGradGuard no_grad;
    weight.fill_(value);
  };
  const auto predict = [&] { return torch::linear(torch::ones({1, 4}), weight).item<float>(); };
  set(1);
  {
    const Autocast outer(kCpu, torch::kBFloat16);
    {
      const Autocast inner(kCpu, torch::kBFloat16);
      EXPECT_EQ(predict(), 4);
    }
    set(2);
    EXPECT_EQ(predict(), 4) << "an inner guard cleared the casts of the outer one";
  }
  const Autocast next(kCpu, torch::kBFloat16);
  EXPECT_EQ(predict(), 8) << "a cast outlived its guard";
}

TEST(Autocast, FollowsWorkToLogicalDevices) {
  const Devices devices("cpu:2");
  std::future<torch::ScalarType> later;
  {
    const Autocast amp(devices[1], torch::kBFloat16);
    EXPECT_EQ(devices[0].run("multiply", product_dtype), torch::kBFloat16);
    {
      const Autocast off(devices[1], torch::kBFloat16, false);
      EXPECT_EQ(devices[1].run("multiply", product_dtype), torch::kFloat);
    }
    later = devices[1].submit("multiply", product_dtype);
  }
  EXPECT_EQ(later.get(), torch::kBFloat16) << "work belongs to the guard it was given in";
  EXPECT_EQ(devices[1].run("multiply", product_dtype), torch::kFloat);
}

// A training loop that is one task: its guards are the outermost ones unless the caller has one.
TEST(Autocast, GuardsInATaskSeeWeightsThatChangedInIt) {
  const Devices devices("cpu:1");
  const auto weight = torch::ones({1, 4}).requires_grad_();
  const auto train = [&] {
    std::vector<float> outputs;
    for (const double value : {1.0, 2.0, 3.0}) {
      {
        const torch::NoGradGuard no_grad;
        weight.fill_(value);
      }
      const Autocast amp(kCpu, torch::kBFloat16);
      outputs.push_back(torch::linear(torch::ones({1, 4}), weight).item<float>());
    }
    return outputs;
  };
  EXPECT_EQ(devices[0].run("train", train), (std::vector<float>{4, 8, 12}));
  const Autocast outer(kCpu, torch::kBFloat16);
  EXPECT_EQ(devices[0].run("train", train), (std::vector<float>{4, 4, 4}));
}

// [step] losses of a net that trains under Autocast.
std::vector<float> bf16_losses(const std::function<torch::Tensor(const torch::Tensor&)>& forward,
                               torch::optim::Optimizer& optimizer) {
  const auto x = torch::arange(72).view({12, 6}).mul(0.31).sin();
  const auto y = torch::stack({x.sum(1), x.cumsum(1).mean(1), x.select(1, 0)}, 1).mul(0.3);
  std::vector<float> losses;
  for (int step = 0; step < 30; ++step) {
    torch::Tensor loss;
    {
      const Autocast amp(kCpu, torch::kBFloat16);
      const auto out = forward(x);
      EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
      loss = torch::mse_loss(out, y);
    }
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

TEST(Autocast, DataParallelTrainsInItAsOneDeviceDoes) {
  torch::manual_seed(2);
  Net alone;
  Net parallel_net;
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 4; ++i) parallel_net->parameters()[i].copy_(alone->parameters()[i]);
  }
  torch::optim::SGD alone_optimizer(alone->parameters(), 0.5);
  const auto expected =
      bf16_losses([&](const torch::Tensor& x) { return alone(x); }, alone_optimizer);
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  DataParallel parallel(parallel_net, devices);
  torch::optim::SGD optimizer(parallel_net->parameters(), 0.5);
  const auto losses = bf16_losses([&](const torch::Tensor& x) { return parallel(x); }, optimizer);
  EXPECT_LT(expected.back(), expected.front() / 2) << "it does not train";
  for (size_t step = 0; step < losses.size(); ++step) {
    EXPECT_NEAR(losses[step], expected[step], 0.01 * expected[0]) << step;  // bf16: 8 bits
  }
}

TEST(Autocast, RefusesWhatIsNotALowerPrecision) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kInt}) {
    expect_error(Code::kUsage, {toString(dtype), "kBFloat16"},
                 [&] { const Autocast amp(kCpu, dtype); });
  }
  EXPECT_EQ(product_dtype(), torch::kFloat);
  const Autocast off(kCpu, torch::kFloat, false);  // nothing is asked for
  EXPECT_EQ(product_dtype(), torch::kFloat);
}

TEST(Autocast, HalfOnTheCpuWorksOrOffersBFloat16) {
  if (compat::kCpuAutocastHalf) {
    const Autocast amp(kCpu, torch::kHalf);
    EXPECT_EQ(product_dtype(), torch::kHalf);
    return;
  }
  expect_error(Code::kEngine, {"fp16", "CPU", TORCH_VERSION, "bf16", "GPU"},
               [] { require_autocast(kCpu, torch::kHalf); });
  expect_error(Code::kEngine, {"bf16"}, [] { const Autocast amp(kCpu, torch::kHalf); });
  EXPECT_EQ(exit_code(Code::kEngine), 2);
  const Autocast off(kCpu, torch::kHalf, false);
}

TEST(Autocast, RefusesDevicesThatAreNotHere) {
  expect_error(Code::kDeviceMissing, {"xla"},
               [] { const Autocast amp(torch::Device(torch::kXLA, 0), torch::kBFloat16); });
  if (torch::cuda::is_available()) return;
  expect_error(Code::kDeviceMissing, {"cuda:0", "bf16"},
               [] { const Autocast amp(torch::Device(torch::kCUDA, 0), torch::kHalf); });
}

TEST(Autocast, TheFastPrecisionOfEachDevice) {
  EXPECT_EQ(default_autocast_dtype(kCpu), torch::kBFloat16);
  EXPECT_EQ(default_autocast_dtype(torch::kCUDA), torch::kHalf);
}

}  // namespace
}  // namespace lockstep::test::autocast_test
