// What cannot be captured is named, and leaves nothing behind.

#include <gtest/gtest.h>
#include <torch/torch.h>
#if LOCKSTEP_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

#include <functional>
#include <stdexcept>

#include "captured_step_support.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"
#include "lockstep/grad_scaler.hpp"
#include "support.hpp"

namespace lockstep::test::captured_step_errors_test {
namespace {

// Trains with a step that does `bad` while it is captured, and continues after the error.
void expect_named(const std::function<void(const torch::Tensor&)>& bad, const std::string& name) {
  const auto train = [&](bool with_bad) {
    SgdNet trained;
    CapturedStep step(
        [&](const torch::Tensor& x, const torch::Tensor& y) {
          const auto loss = trained.loss(x, y);
          if (with_bad) bad(loss.detach());
          trained.optimizer.step({.zero_grad = true});
          return loss;
        },
        {.enabled = with_bad});
    std::vector<float> losses;
    int errors = 0;
    for (int i = 0; i < 8; ++i) {
      const auto [x, y] = rows_of_step(i);
      try {
        losses.push_back(step(x, y).item<float>());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kCapture) << error.block();
        EXPECT_NE(error.message().find(name), std::string::npos) << error.block();
        EXPECT_FALSE(error.help().empty());
        EXPECT_EQ(i, 3) << error.block();
        ++errors;
        trained.net->zero_grad(/*set_to_none=*/true);
        losses.push_back(step(x, y).item<float>());
      }
    }
    EXPECT_EQ(errors, with_bad ? 1 : 0);
    EXPECT_FALSE(step.replayed());
    EXPECT_EQ(step.stats().memory_bytes, 0);
    return result_of(std::move(losses), *trained.net);
  };
  expect_same_bits(train(true), train(false));
}

TEST_F(CudaCapture, NamesAReadOfAValueAndTrainsOn) {
  expect_named([](const torch::Tensor& loss) { (void)loss.item<float>(); }, "aten::item");
}

TEST_F(CudaCapture, NamesACopyToTheHostAndTrainsOn) {
  expect_named([](const torch::Tensor& loss) { (void)loss.cpu(); }, "aten::");
}

TEST_F(CudaCapture, NamesAResultOfUnknownSizeAndTrainsOn) {
  expect_named([](const torch::Tensor& loss) { (void)torch::nonzero(loss); }, "aten::nonzero");
}

// The generator and the allocator must not be left recording.
TEST_F(CudaCapture, AFailedCaptureLeavesNothingBehind) {
  CapturedStep bad([](const torch::Tensor& x) {
    const auto y = torch::dropout(x, 0.5, /*train=*/true);
    return y + y.sum().item<float>();
  });
  const auto x = torch::ones({64}, kGpu);
  for (int i = 0; i < 3; ++i) bad(x);
  EXPECT_THROW(bad(x), Error);
  torch::manual_seed(5);
  const auto first = torch::rand({16}, kGpu);
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(torch::rand({16}, kGpu), first));
#if LOCKSTEP_CUDA
  c10::cuda::CUDACachingAllocator::emptyCache();
#endif
  expect_same_bits(train_sgd(true, 0.5), train_sgd(false, 0.5));
}

TEST_F(CudaCapture, GradientsOfAFailedCaptureAreNotLeftAsRubbish) {
  SgdNet trained;
  int calls = 0;
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    trained.net->zero_grad(/*set_to_none=*/true);
    const auto loss = trained.loss(x, y);
    if (++calls == 4) (void)loss.item<float>();
    return loss;
  });
  const auto [x, y] = rows_of_step(0);
  for (int i = 0; i < 3; ++i) step(x, y);
  EXPECT_THROW(step(x, y), Error);
  for (const auto& weight : trained.net->parameters()) {
    ASSERT_TRUE(weight.grad().defined());
    EXPECT_EQ(weight.grad().abs().sum().item<float>(), 0);
  }
}

TEST_F(CudaCapture, AFailedCaptureOfALaterShapeKeepsWhatAnEarlierOneComputed) {
  torch::Tensor kept;
  CapturedStep step([&](const torch::Tensor& x) {
    const auto doubled = x * 2;
    if (x.size(0) == 4) kept = doubled;
    return x.size(0) == 4 ? doubled.sum() : doubled + doubled.sum().item<float>();
  });
  for (int i = 0; i < 5; ++i) step(torch::full({4}, i, kGpu));
  ASSERT_TRUE(step.replayed());
  const auto other = torch::ones({8}, kGpu);
  step(other);  // warms up
  EXPECT_THROW(step(other), Error);
  EXPECT_TRUE(torch::equal(kept, torch::full({4}, 8.0F, kGpu)));
}

TEST_F(CudaCapture, GrowthRulesThatWereLoadedSinceNeedANewCapture) {
  SgdNet trained;
  GradScaler scaler;
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    const auto loss = torch::mse_loss(trained.net->forward(x), y);
    scaler.scale(loss).backward();
    scaler.step(trained.optimizer, {.zero_grad = true});
    scaler.update();
    return loss;
  });
  losses_of(step, 5);
  ASSERT_TRUE(step.replayed()) << step.why_not();
  GradScalerState state = *scaler.state_dict();
  state.scale = 1024;
  scaler.load_state_dict(state);
  losses_of(step, 1);
  EXPECT_TRUE(step.replayed()) << "a scale is no rule";
  EXPECT_EQ(scaler.state_dict()->scale, 1024);
  state.growth_interval = 100;
  scaler.load_state_dict(state);
  try {
    losses_of(step, 1);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCapture) << error.block();
    EXPECT_NE(error.message().find("growth rules"), std::string::npos) << error.block();
  }
}

TEST_F(CudaCapture, AnErrorOfTheStepItselfPassesAndTheNextCallIsCaptured) {
  bool fails = false;
  CapturedStep step([&](const torch::Tensor& x) {
    if (fails) throw std::runtime_error("no such file");
    return x + 1;
  });
  const auto x = torch::ones({4}, kGpu);
  for (int i = 0; i < 3; ++i) step(x);
  fails = true;
  try {
    step(x);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no such file");
  }
  fails = false;
  EXPECT_EQ(step(x)[0].item<float>(), 2);
  EXPECT_TRUE(step.replayed());
}

TEST_F(CudaCapture, RefusesDataParallelInside) {
  const Devices devices("cuda:0*2");
  const UseDevice home(devices[0]);
  auto net = make_net();
  DataParallel parallel(net, devices);
  CapturedStep step([&](const torch::Tensor& x) { return parallel(x).sum(); });
  const auto x = rows_of_step(0).x;
  for (int i = 0; i < 3; ++i) step(x);
  try {
    step(x);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kCapture) << error.block();
    EXPECT_NE(error.message().find("stream of its own"), std::string::npos) << error.block();
  }
  EXPECT_TRUE(step(x).defined());
}

}  // namespace
}  // namespace lockstep::test::captured_step_errors_test
