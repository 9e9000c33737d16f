// Captured steps: the numbers of eager ones, bit by bit, and the memory that the graphs hold.

#include "lockstep/captured_step.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <thread>

#include "captured_step_support.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/device.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/optim.hpp"

namespace lockstep::test::captured_step_test {
namespace {

TEST_F(CudaCapture, SgdTrainsAsItDoesWithout) {
  expect_same_bits(train_sgd(true), train_sgd(false));
}

TEST_F(CudaCapture, DropoutDrawsTheNumbersItDrawsWithout) {
  expect_same_bits(train_sgd(true, 0.5), train_sgd(false, 0.5));
}

TEST_F(CudaCapture, WorksOnTheStreamOfALogicalDevice) {
  const Result expected = train_sgd(false);
  const Devices devices("cuda:0*2");
  const UseDevice home(devices[1]);
  expect_same_bits(train_sgd(true), expected);
}

Result train_amp(bool enabled, bool masters_wanted) {
  auto net = make_net();
  std::optional<MasterWeights> masters;
  if (masters_wanted) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kHalf});
  AdamW optimizer(net->parameters(), {.lr = 1e-2, .masters = masters});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 5});
  CapturedStep step(
      [&](const torch::Tensor& x, const torch::Tensor& y) {
        torch::Tensor loss;
        {
          const Autocast amp(kGpu, torch::kHalf);
          loss = torch::mse_loss(net->forward(x), y);
        }
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        net->zero_grad(/*set_to_none=*/true);
        return loss;
      },
      {.enabled = enabled});
  auto losses = losses_of(step, kSteps, [](int i) {
    const Rows rows = rows_of_step(i);
    if (i == 12) rows.y.fill_(1e30F);  // overflows and must be skipped, also in a replay
    return rows;
  });
  EXPECT_EQ(step.replayed(), enabled) << step.why_not();
  EXPECT_EQ(scaler.skipped_steps().size(), 1U);
  losses.push_back(static_cast<float>(scaler.get_scale()));
  return result_of(std::move(losses), *net);
}

TEST_F(CudaCapture, AScaledStepInHalfPrecisionTrainsAsItDoesWithout) {
  expect_same_bits(train_amp(true, false), train_amp(false, false));
}

TEST_F(CudaCapture, SoItDoesWithMasterWeights) {
  expect_same_bits(train_amp(true, true), train_amp(false, true));
}

// Four micro-steps and the update in one captured step.
Result train_accumulating(bool enabled) {
  auto net = make_net();
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  CapturedStep step(
      [&](const std::vector<torch::Tensor>& all) {
        torch::Tensor sum;
        for (size_t micro = 0; micro < 4; ++micro) {
          const auto loss = torch::mse_loss(net->forward(all[2 * micro]), all[2 * micro + 1]) / 4;
          loss.backward();
          sum = sum.defined() ? sum + loss.detach() : loss.detach();
        }
        optimizer.step({.zero_grad = true});
        return sum;
      },
      {.enabled = enabled});
  std::vector<float> losses;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<torch::Tensor> all;
    for (int micro = 0; micro < 4; ++micro) {
      const auto [x, y] = rows_of_step(4 * i + micro);
      all.insert(all.end(), {x, y});
    }
    losses.push_back(step(all).item<float>());
  }
  EXPECT_EQ(step.replayed(), enabled) << step.why_not();
  return result_of(std::move(losses), *net);
}

TEST_F(CudaCapture, AccumulationIsPartOfTheGraph) {
  expect_same_bits(train_accumulating(true), train_accumulating(false));
}

TEST_F(CudaCapture, EachShapeIsCapturedAndTheOldestForgotten) {
  const auto train = [](bool enabled, int max_shapes, const std::string& shapes) {
    SgdNet trained;
    CapturedStep step =
        trained.captured({.enabled = enabled, .warmup = 2, .max_shapes = max_shapes});
    auto losses = losses_of(step, static_cast<int>(shapes.size()), [&shapes](int i) {
      return rows_of_step(i, 8 + (shapes[static_cast<size_t>(i)] - 'A'));
    });
    return std::make_pair(result_of(std::move(losses), *trained.net), step.stats());
  };
  const auto [eager, none] = train(false, 4, "AAAABABAB");
  const auto [captured, stats] = train(true, 4, "AAAABABAB");
  expect_same_bits(captured, eager);
  EXPECT_EQ(none.captures, 0);
  EXPECT_EQ(stats.captures, 2);
  EXPECT_EQ(stats.replays, 2 + 1 + 1 + 1 + 1) << "A: two warm-ups, B: one";

  const auto [alone, kept_one] = train(true, 1, "AAAABBAAA");
  expect_same_bits(alone, train(false, 1, "AAAABBAAA").first);
  EXPECT_EQ(kept_one.captures, 3) << "A, B, and A again";
}

// libtorch lists the graphs of a generator without a lock, and its pool has 32 streams: here they
// would not be enough.
TEST_F(CudaCapture, ThreadsMakeAndDestroyGraphsAtTheSameTime) {
  const Devices devices("cuda:0*4");
  std::vector<std::thread> threads;
  for (int of = 0; of < 4; ++of) {
    threads.emplace_back([of, &devices] {
      const UseDevice home(devices[of]);
      const auto train = [of] {
        for (int i = 0; i < 40; ++i) {
          CapturedStep step([of](const torch::Tensor& x) { return x * of; }, {.warmup = 1});
          const auto x = torch::full({64}, i, kGpu);
          for (int call = 0; call < 3; ++call) EXPECT_TRUE(torch::equal(step(x), x * of));
          EXPECT_TRUE(step.replayed()) << step.why_not();
        }
      };
      EXPECT_NO_THROW(train());
    });
  }
  for (auto& thread : threads) thread.join();
}

// A loader writes each batch where the graphs read it.
TEST_F(CudaCapture, InputsMayBeFilledInPlace) {
  const auto train = [](bool enabled) {
    SgdNet trained;
    CapturedStep step = trained.captured({.enabled = enabled});
    EXPECT_TRUE(step.inputs().empty()) << "before the first call";
    auto losses = losses_of(step, kSteps, [&step](int i) {
      const Rows rows = rows_of_step(i);
      const auto own = step.inputs();
      if (own.empty()) return rows;
      own.at(0).copy_(rows.x);
      own.at(1).copy_(rows.y);
      return Rows{own.at(0), own.at(1)};
    });
    EXPECT_EQ(step.inputs().size(), enabled ? 2 : 0);
    return result_of(std::move(losses), *trained.net);
  };
  expect_same_bits(train(true), train(false));
}

TEST_F(CudaCapture, LearningRatesMayChangeBetweenReplays) {
  const auto train = [](bool enabled) {
    SgdNet trained;
    CapturedStep step = trained.captured({.enabled = enabled});
    auto losses = losses_of(step, kSteps, [&trained](int i) {
      trained.optimizer.param_groups()[0].options().set_lr(0.1 / (1 + i));
      return rows_of_step(i);
    });
    return result_of(std::move(losses), *trained.net);
  };
  expect_same_bits(train(true), train(false));
}

TEST_F(CudaCapture, GradientsThatAStepKeepsAreThoseOfTheLastReplay) {
  SgdNet trained;
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    trained.net->zero_grad(/*set_to_none=*/true);
    return trained.loss(x, y);
  });
  losses_of(step, 6);
  ASSERT_TRUE(step.replayed());
  std::vector<torch::Tensor> kept;
  for (const auto& weight : trained.net->parameters()) kept.push_back(weight.grad().clone());
  trained.net->zero_grad(/*set_to_none=*/true);
  const auto [x, y] = rows_of_step(5);
  trained.loss(x, y);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(torch::equal(kept[i], trained.net->parameters()[i].grad())) << i;
  }
}

TEST_F(CudaCapture, ResultsAreTheCallers) {
  CapturedStep step([](const torch::Tensor& x) { return x * 2; });
  std::vector<torch::Tensor> results;
  for (int i = 0; i < 8; ++i) results.push_back(step(torch::full({4}, i, kGpu)));
  EXPECT_TRUE(step.replayed());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(results[static_cast<size_t>(i)][0].item<int>(), 2 * i);
}

TEST_F(CudaCapture, TheDevicesAccountHoldsWhatTheGraphsHold) {
  const Devices devices("cuda:0");
  const UseDevice home(devices[0]);
  const int64_t before = devices[0].memory().live_bytes;
  constexpr int64_t kBytes = int64_t{4} << 20;  // of one intermediate result
  const auto x = torch::ones({kBytes / 4}, kGpu);
  {
    CapturedStep step([](const torch::Tensor& in) { return ((in * 2).relu() + in).sum(); });
    for (int i = 0; i < 3; ++i) step(x);
    EXPECT_EQ(step.stats().memory_bytes, 0);
    devices[0].reset_peak_memory();
    EXPECT_EQ(step(x).item<float>(), 3.0F * static_cast<float>(kBytes / 4));
    EXPECT_GE(step.stats().memory_bytes, 2 * kBytes) << "two of the three live at once";
    EXPECT_LT(step.stats().memory_bytes, 4 * kBytes);
    const int64_t live = devices[0].memory().live_bytes;
    EXPECT_GE(live - before, kBytes + kBytes + 2 * kBytes) << "x, its copy, and what is held";
    step(x);
    EXPECT_EQ(devices[0].memory().live_bytes, live);
    EXPECT_LT(devices[0].memory().peak_bytes - before, 7 * kBytes);
  }
  EXPECT_EQ(devices[0].memory().live_bytes - before, kBytes) << "only x is left";
}

}  // namespace
}  // namespace lockstep::test::captured_step_test
