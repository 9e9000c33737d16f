// Captured steps: the numbers of eager ones, bit by bit; what cannot be captured is named and
// leaves nothing behind; memory; ranks that talk between graphs.

#include "lockstep/captured_step.hpp"

#include <ATen/CPUGeneratorImpl.h>
#if LOCKSTEP_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "lockstep/adamw.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/sgd.hpp"
#include "ranks/rank_threads.hpp"
#include "torch_compat.hpp"

namespace lockstep::test {
namespace {

const torch::Device kGpu(torch::kCUDA, 0);

class CudaCapture : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
};

torch::nn::Sequential make_net(double dropout = 0) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::ReLU());
  if (dropout > 0) net->push_back(torch::nn::Dropout(dropout));
  net->push_back(torch::nn::Linear(64, 64));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(64, 8));
  net->to(kGpu);
  return net;
}

struct Rows {
  torch::Tensor x;
  torch::Tensor y;
};

Rows rows_of_step(int step, int64_t rows = 16) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step) + 100);
  return {torch::randn({rows, 32}, generator).to(kGpu),
          torch::randn({rows, 8}, generator).to(kGpu)};
}

// What a run leaves: every loss, and the weights.
struct Result {
  std::vector<float> losses;
  std::vector<torch::Tensor> weights;
};

void expect_same_bits(const Result& captured, const Result& eager) {
  EXPECT_EQ(captured.losses, eager.losses);
  ASSERT_EQ(captured.weights.size(), eager.weights.size());
  for (size_t i = 0; i < eager.weights.size(); ++i) {
    EXPECT_TRUE(torch::equal(captured.weights[i], eager.weights[i])) << "weight " << i;
  }
}

Result result_of(std::vector<float> losses, const torch::nn::Module& net) {
  Result result{std::move(losses), {}};
  for (const auto& weight : net.parameters()) result.weights.push_back(weight.detach().clone());
  return result;
}

constexpr int kSteps = 20;

Result train_sgd(bool enabled, double dropout = 0) {
  auto net = make_net(dropout);
  Sgd optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  CapturedStep step(
      [&](const torch::Tensor& x, const torch::Tensor& y) {
        const auto loss = torch::mse_loss(net->forward(x), y);
        loss.backward();
        optimizer.step({.zero_grad = true});
        return loss;
      },
      {.enabled = enabled});
  torch::manual_seed(11);
  std::vector<float> losses;
  for (int i = 0; i < kSteps; ++i) {
    const auto [x, y] = rows_of_step(i);
    losses.push_back(step(x, y).item<float>());
  }
  EXPECT_EQ(step.replayed(), enabled) << step.why_not();
  EXPECT_EQ(step.stats().captures, enabled ? 1 : 0);
  EXPECT_EQ(step.stats().replays, enabled ? kSteps - 3 : 0);
  EXPECT_EQ(step.stats().graphs, enabled ? 1 : 0);
  return result_of(std::move(losses), *net);
}

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
  std::vector<float> losses;
  for (int i = 0; i < kSteps; ++i) {
    auto [x, y] = rows_of_step(i);
    if (i == 12) y.fill_(1e30F);  // this step overflows and must be skipped, also in a replay
    losses.push_back(step(x, y).item<float>());
  }
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
    auto net = make_net();
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    CapturedStep step(
        [&](const torch::Tensor& x, const torch::Tensor& y) {
          const auto loss = torch::mse_loss(net->forward(x), y);
          loss.backward();
          optimizer.step({.zero_grad = true});
          return loss;
        },
        {.enabled = enabled, .warmup = 2, .max_shapes = max_shapes});
    std::vector<float> losses;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto [x, y] = rows_of_step(static_cast<int>(i), 8 + (shapes[i] - 'A'));
      losses.push_back(step(x, y).item<float>());
    }
    return std::make_pair(result_of(std::move(losses), *net), step.stats());
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

TEST_F(CudaCapture, LearningRatesMayChangeBetweenReplays) {
  const auto train = [](bool enabled) {
    auto net = make_net();
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    CapturedStep step(
        [&](const torch::Tensor& x, const torch::Tensor& y) {
          const auto loss = torch::mse_loss(net->forward(x), y);
          loss.backward();
          optimizer.step({.zero_grad = true});
          return loss;
        },
        {.enabled = enabled});
    std::vector<float> losses;
    for (int i = 0; i < kSteps; ++i) {
      optimizer.param_groups()[0].options().set_lr(0.1 / (1 + i));
      const auto [x, y] = rows_of_step(i);
      losses.push_back(step(x, y).item<float>());
    }
    return result_of(std::move(losses), *net);
  };
  expect_same_bits(train(true), train(false));
}

TEST_F(CudaCapture, GradientsThatAStepKeepsAreThoseOfTheLastReplay) {
  auto net = make_net();
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    net->zero_grad(/*set_to_none=*/true);
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    return loss;
  });
  for (int i = 0; i < 6; ++i) step(rows_of_step(i).x, rows_of_step(i).y);
  ASSERT_TRUE(step.replayed());
  std::vector<torch::Tensor> kept;
  for (const auto& weight : net->parameters()) kept.push_back(weight.grad().clone());
  net->zero_grad(/*set_to_none=*/true);
  const auto [x, y] = rows_of_step(5);
  torch::mse_loss(net->forward(x), y).backward();
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(torch::equal(kept[i], net->parameters()[i].grad())) << i;
  }
}

TEST_F(CudaCapture, ResultsAreTheCallers) {
  CapturedStep step([](const torch::Tensor& x) { return x * 2; });
  std::vector<torch::Tensor> results;
  for (int i = 0; i < 8; ++i) results.push_back(step(torch::full({4}, i, kGpu)));
  EXPECT_TRUE(step.replayed());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(results[static_cast<size_t>(i)][0].item<int>(), 2 * i);
}

// Trains with a step that does `bad` once it is captured, and goes on after the error.
void expect_named(const std::function<void(const torch::Tensor&)>& bad, const std::string& name) {
  const auto train = [&](bool with_bad) {
    auto net = make_net();
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    CapturedStep step(
        [&](const torch::Tensor& x, const torch::Tensor& y) {
          const auto loss = torch::mse_loss(net->forward(x), y);
          loss.backward();
          if (with_bad) bad(loss.detach());
          optimizer.step({.zero_grad = true});
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
        net->zero_grad(/*set_to_none=*/true);
        losses.push_back(step(x, y).item<float>());
      }
    }
    EXPECT_EQ(errors, with_bad ? 1 : 0);
    EXPECT_FALSE(step.replayed());
    EXPECT_EQ(step.stats().memory_bytes, 0);
    return result_of(std::move(losses), *net);
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

// The generator and the allocator must not think that a capture goes on.
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
  auto net = make_net();
  int calls = 0;
  CapturedStep step([&](const torch::Tensor& x, const torch::Tensor& y) {
    net->zero_grad(/*set_to_none=*/true);
    const auto loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    if (++calls == 4) (void)loss.item<float>();
    return loss;
  });
  const auto [x, y] = rows_of_step(0);
  for (int i = 0; i < 3; ++i) step(x, y);
  EXPECT_THROW(step(x, y), Error);
  for (const auto& weight : net->parameters()) {
    ASSERT_TRUE(weight.grad().defined());
    EXPECT_EQ(weight.grad().abs().sum().item<float>(), 0);
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

// Every rank a thread on a slot of the GPU, with that slot's stream.
void run_on_gpu(int size, const std::function<void(const Communicator&, Device&)>& body) {
  const Devices devices("cuda:0*" + std::to_string(size));
  auto comms = Communicator::threads(size, kGpu);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, comm = std::move(comms[static_cast<size_t>(rank)])]() mutable {
      const UseDevice home(devices[static_cast<size_t>(rank)]);
      const compat::BackwardOnThisThread on_this_thread;
      try {
        const Communicator mine = std::move(comm);
        body(mine, devices[static_cast<size_t>(rank)]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << describe(error);
      }
    });
  }
  comms.clear();
  for (auto& thread : threads) thread.join();
}

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
  for (int i = 0; i < 8; ++i) step(rows_of_step(i).x, rows_of_step(i).y);
  EXPECT_TRUE(step.replayed()) << step.why_not();
  EXPECT_EQ(step.stats().graphs, 1);
  EXPECT_EQ(ddp.stats().synchronised_backwards, 8);
}

}  // namespace
}  // namespace lockstep::test
