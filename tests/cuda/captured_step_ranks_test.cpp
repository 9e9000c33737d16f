// Captured steps of ranks communicate between the graphs and train as steps without capture do.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <optional>

#include "captured_step_support.hpp"
#include "gpu_ranks.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/optim.hpp"

namespace lockstep::test::captured_step_ranks_test {
namespace {

struct DdpRun {
  Result result;
  DdpStats stats;
  CaptureStats capture;
};

// Two ranks, each on half of the rows, with `micro_steps` in a step.
std::vector<DdpRun> train_ddp(bool enabled, int micro_steps) {
  std::vector<DdpRun> runs(2);
  std::mutex making;  // ranks seed one generator
  run_on_gpu(2, [&](const Communicator& comm, Device&) {
    torch::nn::Sequential net;
    {
      const std::lock_guard lock(making);
      net = make_net();
    }
    DistributedDataParallel<torch::nn::SequentialImpl> ddp(
        net.ptr(), comm, {.first_bucket_bytes = 4096, .bucket_cap_bytes = 8192});
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    CapturedStep step(
        [&](const std::vector<torch::Tensor>& all) {
          torch::Tensor sum;
          for (int micro = 0; micro < micro_steps; ++micro) {
            std::optional<NoSync> no_sync;
            if (micro + 1 < micro_steps) no_sync.emplace(ddp);
            const auto at = static_cast<size_t>(2 * micro);
            const auto loss = torch::mse_loss(ddp(all[at]), all[at + 1]);
            (loss / micro_steps).backward();
            sum = sum.defined() ? sum + loss.detach() : loss.detach();
          }
          optimizer.step({.zero_grad = true});
          return sum;
        },
        {.enabled = enabled});
    std::vector<float> losses;
    for (int i = 0; i < kSteps; ++i) {
      std::vector<torch::Tensor> all;
      for (int micro = 0; micro < micro_steps; ++micro) {
        const auto [x, y] = rows_of_step(i * micro_steps + micro);
        all.insert(all.end(), {x.chunk(2)[static_cast<size_t>(comm.rank())].clone(),
                               y.chunk(2)[static_cast<size_t>(comm.rank())].clone()});
      }
      losses.push_back(step(all).item<float>());
    }
    EXPECT_EQ(step.replayed(), enabled) << step.why_not();
    runs[static_cast<size_t>(comm.rank())] = {result_of(std::move(losses), *net), ddp.stats(),
                                              step.stats()};
    ddp.check_replicas();
  });
  return runs;
}

TEST_F(CudaCapture, RanksAverageTheirBucketsBetweenTheGraphs) {
  const auto captured = train_ddp(true, 1);
  const auto eager = train_ddp(false, 1);
  for (size_t rank = 0; rank < 2; ++rank) {
    expect_same_bits(captured[rank].result, eager[rank].result);
    const DdpStats& stats = captured[rank].stats;
    EXPECT_EQ(stats.synchronised_backwards, kSteps);
    EXPECT_EQ(stats.all_reduces, eager[rank].stats.all_reduces);
    EXPECT_EQ(stats.bytes, eager[rank].stats.bytes);
    EXPECT_EQ(stats.last_step.size(), eager[rank].stats.last_step.size());
    ASSERT_GT(stats.last_step.size(), 1U);
    // A graph before each bucket, and the update after the last.
    EXPECT_LE(captured[rank].capture.graphs, static_cast<int64_t>(stats.last_step.size()) + 1);
    EXPECT_GT(captured[rank].capture.graphs, 2);
  }
}

TEST_F(CudaCapture, RanksAccumulateInsideTheStepAndTalkOnce) {
  const auto captured = train_ddp(true, 4);
  const auto eager = train_ddp(false, 4);
  for (size_t rank = 0; rank < 2; ++rank) {
    expect_same_bits(captured[rank].result, eager[rank].result);
    EXPECT_EQ(captured[rank].stats.synchronised_backwards, kSteps);
    EXPECT_EQ(captured[rank].stats.all_reduces, eager[rank].stats.all_reduces);
  }
}

// The hooks' accumulators were made on the default stream, which cannot be captured.
TEST_F(CudaCapture, OneRankIsOneGraphAlsoOnTheDefaultStream) {
  auto net = make_net();
  DistributedDataParallel<torch::nn::SequentialImpl> ddp(net.ptr(), Communicator::self());
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    const auto loss = torch::mse_loss(ddp(x), y);
    loss.backward();
    optimizer.step({.zero_grad = true});
    return loss;
  });
  losses_of(step, 8);
  EXPECT_TRUE(step.replayed()) << step.why_not();
  EXPECT_EQ(step.stats().graphs, 1);
  EXPECT_EQ(ddp.stats().synchronised_backwards, 8);
}

}  // namespace
}  // namespace lockstep::test::captured_step_ranks_test
