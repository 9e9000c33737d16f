// Pipelines on GPUs, several stages on one: the CPU's numbers, the same bits every time, streams in
// order, memory charged to the right slot.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "gpu_test.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::pipeline_cuda_test {
namespace {

constexpr int64_t kWidth = 64;
constexpr int kSteps = 10;

using CudaPipeline = test::GpuTest;

torch::nn::Sequential make_net(int64_t layers = 8) {
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

torch::Tensor mse(const torch::Tensor& out, const torch::Tensor& y) {
  return torch::mse_loss(out, y);
}

std::pair<torch::Tensor, torch::Tensor> batch_of(int step, int64_t rows) {
  torch::manual_seed(static_cast<uint64_t>(100 + step));
  const auto x = torch::randn({rows, kWidth});
  return {x, torch::sin(x)};
}

std::vector<torch::Tensor> weights_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : parameters) weights.push_back(parameter.detach().cpu().clone());
  return weights;
}

std::vector<torch::Tensor> train_on_cpu(int64_t rows) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const auto [x, y] = batch_of(step, rows);
    mse(net->forward(x), y).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return weights_of(net->parameters());
}

std::vector<torch::nn::Sequential> cut(const torch::nn::Sequential& net, int stages) {
  return split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), stages));
}

struct Case {
  std::string schedule;
  int stages, micro_batches;
  int64_t rows;
};

std::vector<torch::Tensor> train(const Case& c, const std::vector<int>& recompute = {}) {
  const auto schedule = make_schedule(c.schedule, c.stages, c.micro_batches);
  const Devices devices("cuda:0*" + std::to_string(schedule.ranks()));
  Pipeline pipeline(cut(make_net(), c.stages), devices, schedule,
                    {.loss = mse, .recompute = recompute});
  Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
  for (int step = 0; step < kSteps; ++step) {
    const auto [x, y] = batch_of(step, c.rows);
    pipeline.step(x.cuda(), y.cuda());
    optimizer.step();
    optimizer.zero_grad();
  }
  return weights_of(pipeline.parameters());
}

void expect_weights(const std::vector<torch::Tensor>& actual,
                    const std::vector<torch::Tensor>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-4, 1e-5))
        << what << ", weight " << i << ": " << (actual[i] - expected[i]).abs().max().item<double>();
  }
}

TEST_F(CudaPipeline, WeightsEqualTheCpus) {
  for (const Case& c :
       {Case{"1f1b", 2, 8, 32}, Case{"1f1b", 4, 8, 32}, Case{"gpipe", 2, 4, 32},
        Case{"gpipe", 4, 3, 32}, Case{"zero-bubble", 2, 8, 32}, Case{"zero-bubble", 4, 8, 32},
        Case{"interleaved", 4, 4, 32}, Case{"interleaved", 8, 8, 32}, Case{"sequential", 2, 4, 32},
        Case{"1f1b", 2, 3, 32}}) {
    expect_weights(train(c), train_on_cpu(c.rows), c.schedule + " " + std::to_string(c.stages));
  }
  expect_weights(train({"1f1b", 2, 4, 32}, {0, 1}), train_on_cpu(32), "recomputed");
}

// A missing wait between streams would show as other bits now and then.
void expect_the_same_bits_in_many_runs(const std::string& schedule) {
  const auto first = train({schedule, 4, 8, 256});
  for (int run = 0; run < 6; ++run) {
    const auto again = train({schedule, 4, 8, 256});
    for (size_t i = 0; i < first.size(); ++i) {
      ASSERT_TRUE(again[i].equal(first[i])) << "run " << run << ", weight " << i;
    }
  }
}

TEST_F(CudaPipeline, ManyRunsGiveTheSameBits) {
  expect_the_same_bits_in_many_runs("1f1b");
}

TEST_F(CudaPipeline, ManyRunsOfASplitBackwardGiveTheSameBits) {
  expect_the_same_bits_in_many_runs("zero-bubble");
}

TEST_F(CudaPipeline, Fp16WithAScalerFollowsOneDevice) {
  auto net = make_net();
  net->to(torch::kCUDA);
  Sgd optimizer(net->parameters(), {.lr = 0.1});
  GradScaler alone_scaler;
  std::vector<double> alone;
  for (int step = 0; step < kSteps; ++step) {
    const auto [x, y] = batch_of(step, 64);
    torch::Tensor loss;
    {
      const Autocast amp(torch::kCUDA, torch::kHalf);
      loss = mse(net->forward(x.cuda()), y.cuda());
    }
    alone_scaler.scale(loss).backward();
    alone_scaler.step(optimizer);
    alone_scaler.update();
    optimizer.zero_grad();
    alone.push_back(loss.item<double>());
  }
  const Devices devices("cuda:0*2");
  Pipeline pipeline(cut(make_net(), 2), devices, one_f_one_b(2, 4), {.loss = mse});
  Sgd staged(pipeline.parameters(), {.lr = 0.1});
  GradScaler scaler;
  for (int step = 0; step < kSteps; ++step) {
    const auto [x, y] = batch_of(step, 64);
    torch::Tensor loss;
    {
      const Autocast amp(torch::kCUDA, torch::kHalf);
      loss = pipeline.step(x.cuda(), y.cuda(), {.scaler = &scaler});
    }
    scaler.step(staged);
    scaler.update();
    staged.zero_grad();
    EXPECT_NEAR(loss.item<double>(), alone[static_cast<size_t>(step)], 2e-3) << step;
  }
}

// The gradient of the input is made on a stage's stream and used on the caller's.
TEST_F(CudaPipeline, InputsAndIgnoredTargetsHaveTheCpusGradients) {
  const auto loss_of = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::cross_entropy_loss(out, y, {}, at::Reduction::Mean, /*ignore_index=*/0);
  };
  const auto x = batch_of(1, 64).first;
  auto y = torch::arange(64) % 3;
  y.narrow(0, 0, 16).zero_();  // the first micro-batch has no target
  auto net = make_net();
  const auto leaf = x.clone().requires_grad_();
  const auto expected_loss = loss_of(net->forward(leaf), y);
  expected_loss.backward();
  for (const std::string name : {"1f1b", "zero-bubble"}) {
    const Devices devices("cuda:0*2");
    auto staged = make_net();
    Pipeline pipeline(cut(staged, 2), devices, make_schedule(name, 2, 4),
                      {.loss = loss_of, .loss_weight = count_targets(0)});
    for (int run = 0; run < 5; ++run) {
      for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
      const auto on_gpu = x.cuda().requires_grad_();
      const auto loss = pipeline.step(on_gpu, y.cuda());
      const auto grad = (on_gpu.grad() * 1).cpu();
      EXPECT_TRUE(torch::allclose(grad, leaf.grad(), 1e-4, 1e-6)) << name << ", run " << run;
      EXPECT_NEAR(loss.item<double>(), expected_loss.item<double>(), 1e-4);
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(torch::allclose(staged->parameters()[i].grad().cpu(),
                                    net->parameters()[i].grad(), 1e-4, 1e-6))
            << name << ", weight " << i;
      }
    }
  }
}

TEST_F(CudaPipeline, SpansAreTheGpusTimes) {
  const Devices devices("cuda:0*2");
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(4096, 4096));
  Pipeline pipeline(cut(net, 2), devices, one_f_one_b(2, 4), {.loss = mse});
  const auto x = torch::randn({4096, 4096}, torch::kCUDA);
  pipeline.step(x, x);
  pipeline.step(x, x);
  const auto& actions = pipeline.last_step().actions;
  ASSERT_EQ(actions.size(), 16u);
  int64_t computed_ns = 0;
  for (const auto& span : actions) {
    EXPECT_LE(span.begin_ns, span.end_ns);
    computed_ns += span.end_ns - span.begin_ns;
  }
  // 3.3 TFLOP cannot take less than this on any GPU of today; a launch alone would.
  EXPECT_GT(computed_ns, 1'000'000);
}

TEST_F(CudaPipeline, WeightsAndActivationsAreChargedToTheirSlot) {
  const auto peaks_of = [](const Schedule& schedule) {
    const Devices devices("cuda:0*2");
    Pipeline pipeline(cut(make_net(16), 2), devices, schedule, {.loss = mse});
    const auto x = torch::randn({65536, kWidth}, torch::kCUDA);
    pipeline.step(x, x);
    devices.synchronize();
    std::vector<int64_t> peaks;
    for (size_t i = 0; i < 2; ++i) devices[i].reset_peak_memory();
    pipeline.step(x, x);
    devices.synchronize();
    for (size_t i = 0; i < 2; ++i) peaks.push_back(devices[i].memory().peak_bytes);
    return peaks;
  };
  const auto all = peaks_of(gpipe(2, 8));
  const auto early = peaks_of(one_f_one_b(2, 8));
  EXPECT_GT(all[0], 0);
  EXPECT_GT(all[1], 0);
  EXPECT_LT(early[0], all[0]);
  EXPECT_LT(early[1], all[1]);
}

// The course's hybrid with both ranks on one GPU: ranks are threads here.
TEST_F(CudaPipeline, RanksWithTheirOwnStagesTrainAsTheCpu) {
  auto comms = Communicator::threads(2);
  const auto expected = train_on_cpu(32);
  std::vector<std::vector<torch::Tensor>> found(2);
  std::vector<std::thread> ranks;
  std::mutex drawing;
  for (size_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank, comm = comms[rank]] {
      const Devices devices("cuda:0*2");
      std::vector<torch::nn::Sequential> stages;
      {
        const std::lock_guard lock(drawing);
        stages = cut(make_net(), 2);
      }
      Pipeline pipeline(stages, devices, one_f_one_b(2, 4), {.loss = mse, .data = comm});
      Sgd optimizer(pipeline.parameters(), {.lr = 0.1});
      for (int step = 0; step < kSteps; ++step) {
        torch::Tensor x, y;
        {
          const std::lock_guard lock(drawing);
          std::tie(x, y) = batch_of(step, 32);
        }
        pipeline.step(x.tensor_split(2)[rank].cuda(), y.tensor_split(2)[rank].cuda());
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_EQ(pipeline.last_step().syncs.size(), 2u);
      for (const auto& sync : pipeline.last_step().syncs) {
        for (const auto& span : pipeline.last_step().actions) {
          if (span.action.stage != sync.stage) continue;
          constexpr int64_t kClocksDifferNs = 20'000;  // the GPU's and the host's
          EXPECT_LE(span.end_ns, sync.begin_ns + kClocksDifferNs)
              << "averaged when its gradients are complete";
        }
      }
      found[rank] = weights_of(pipeline.parameters());
    });
  }
  comms.clear();
  for (auto& thread : ranks) thread.join();
  for (const auto& weights : found) expect_weights(weights, expected, "hybrid");
}

}  // namespace
}  // namespace lockstep::test::pipeline_cuda_test
