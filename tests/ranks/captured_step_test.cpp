// Captured steps where there is nothing to capture: every call runs the function.
// What happens on a GPU is tested in tests/cuda/captured_step_test.cpp.

#include "lockstep/captured_step.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "device/capture.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test::captured_step_test {
namespace {

TEST(CapturedStepOnCpu, RunsTheFunctionInEveryCall) {
  int calls = 0;
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    ++calls;
    return x + y;
  });
  EXPECT_FALSE(step.replayed());
  for (int i = 1; i <= 6; ++i) {
    EXPECT_EQ(step(torch::ones({2}), torch::full({2}, i))[0].item<int>(), 1 + i);
    EXPECT_EQ(calls, i);
  }
  EXPECT_FALSE(step.replayed());
  EXPECT_EQ(step.why_not(), "no input is on a GPU");
  EXPECT_EQ(step.stats().captures + step.stats().replays + step.stats().memory_bytes, 0);
}

TEST(CapturedStepOnCpu, SaysThatItIsOff) {
  CapturedStep step([](const torch::Tensor& x) { return x; }, {.enabled = false});
  step(torch::ones({2}));
  EXPECT_EQ(step.why_not(), "it is off");
}

TEST(CapturedStepOnCpu, TakesAVectorOfTensorsAndMayGiveNothingBack) {
  CapturedStep step([](const std::vector<torch::Tensor>& all) {
    return all.empty() ? torch::Tensor() : torch::stack(all).sum();
  });
  EXPECT_EQ(step({torch::ones({2}), torch::ones({2})}).item<int>(), 4);
  EXPECT_FALSE(step(std::vector<torch::Tensor>()).defined());
  CapturedStep moved = std::move(step);
  EXPECT_EQ(moved({torch::ones({3})}).item<int>(), 3);
}

TEST(CapturedStepOnCpu, TheResultHasNoHistory) {
  const auto weight = torch::ones({2}, torch::requires_grad());
  CapturedStep step([&](const torch::Tensor& x) { return (weight * x).sum(); });
  EXPECT_FALSE(step(torch::ones({2})).requires_grad());
}

TEST(CapturedStepOnCpu, AnErrorOfTheFunctionPasses) {
  CapturedStep step([](const torch::Tensor& x) -> torch::Tensor {
    throw Error(Code::kUsage, "x has " + std::to_string(x.numel()), "give it more");
  });
  expect_error(Code::kUsage, {"x has 2"}, [&] { step(torch::ones({2})); });
}

TEST(CapturedStepOnCpu, NothingIsCapturedMeanwhile) {
  CapturedStep step([](const torch::Tensor& x) {
    EXPECT_EQ(Capture::current(), nullptr);
    require_not_capturing("this", "nothing");
    return x;
  });
  step(torch::ones({2}));
}

// A step of ranks with accumulation gives the weights that the same loop gives without it.
TEST(CapturedStepOnCpu, RanksTrainThroughItAsWithoutIt) {
  const auto train = [](const Communicator& comm, bool through_it) {
    torch::nn::Linear net(4, 2);
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(0.1);
      net->bias.zero_();
    }
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto body = [&](const torch::Tensor& x) {
      for (int micro = 0; micro < 3; ++micro) {
        std::optional<NoSync> no_sync;
        if (micro < 2) no_sync.emplace(ddp);
        (ddp(x + micro).square().mean() / 3).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      return torch::Tensor();
    };
    CapturedStep step(body);
    for (int i = 0; i < 5; ++i) {
      const auto x = torch::full({2, 4}, 0.1 * (i + comm.rank()));
      through_it ? step(x) : body(x);
    }
    EXPECT_EQ(ddp.stats().synchronised_backwards, 5);
    return net->weight.detach().clone();
  };
  run_ranks(2, [&](const Communicator& comm) {
    EXPECT_TRUE(torch::equal(train(comm, true), train(comm, false)));
  });
}

}  // namespace
}  // namespace lockstep::test::captured_step_test
