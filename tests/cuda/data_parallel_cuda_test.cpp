// Logical devices on GPUs: the same numbers as on the CPU, streams in order, memory charged to the
// right slot.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpu_test.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::data_parallel_cuda_test {
namespace {

using Cuda = test::GpuTest;

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 8));
}

// Weights after some steps on one CPU thread.
torch::nn::Sequential train_on_cpu(int64_t rows, int steps) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::manual_seed(7);
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({rows, 32});
    const auto y = torch::randn({rows, 8});
    net->zero_grad(true);
    torch::mse_loss(net->forward(x), y).backward();
    optimizer.step();
  }
  return net;
}

class CudaParity : public Cuda,
                   public testing::WithParamInterface<std::tuple<std::string, int64_t>> {};

TEST_P(CudaParity, WeightsEqualTheCpus) {
  const auto [spec, rows] = GetParam();
  const auto expected = train_on_cpu(rows, 20);
  const Devices devices(spec);
  const UseDevice home(devices[0]);
  auto net = make_net();
  net->to(devices[0].torch_device());
  DataParallel parallel(net, devices);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::manual_seed(7);
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::randn({rows, 32}).to(devices[0].torch_device());
    const auto y = torch::randn({rows, 8}).to(devices[0].torch_device());
    net->zero_grad(true);
    torch::mse_loss(parallel(x), y).backward();
    optimizer.step();
  }
  for (const auto& item : expected->named_parameters()) {
    const auto actual = net->named_parameters()[item.key()].detach().cpu();
    EXPECT_TRUE(torch::allclose(actual, item.value(), 1e-4, 1e-5))
        << item.key() << ": " << (actual - item.value()).abs().max().item<double>();
  }
}

INSTANTIATE_TEST_SUITE_P(SpecsAndRows, CudaParity,
                         testing::Combine(testing::Values("cuda:0", "cuda:0*2", "cuda:0*3",
                                                          "cuda:0*5"),
                                          testing::Values(64, 9, 5)));

TEST_F(Cuda, ReplicasRunOnStreamsOfTheirOwnAndStillSeeFreshWeights) {
  const Devices devices("cuda:0*2");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
  net->to(devices[0].torch_device());
  DataParallel parallel(net, devices);
  const torch::NoGradGuard no_grad;
  const auto weight = net->parameters()[0];
  const auto x = torch::ones({64, 2048}, devices[0].torch_device());
  for (int step = 1; step <= 50; ++step) {
    weight.fill_(step);  // queued on device 0's stream only; the replica must wait for it
    const auto out = parallel(x);
    weight.fill_(-1);  // and this must wait for the replica's reading
    ASSERT_TRUE(torch::equal(out, torch::full_like(out, 2048.0 * step))) << "step " << step;
  }
}

TEST_F(Cuda, MemoryIsChargedToTheSlotThatAsked) {
  const Devices devices("cuda:0*2");
  torch::Tensor kept;
  devices[1].run("allocate", [&] {
    const auto options = torch::device(devices[1].torch_device());
    kept = torch::empty({1 << 20}, options);
    const auto gone = torch::empty({1 << 19}, options);
  });
  EXPECT_EQ(devices[1].memory().live_bytes, 4 << 20);
  EXPECT_EQ(devices[1].memory().peak_bytes, 6 << 20);
  EXPECT_EQ(devices[0].memory().live_bytes, 0);
  kept.reset();
  EXPECT_EQ(devices[1].memory().live_bytes, 0);
}

TEST_F(Cuda, AtRestDeviceZeroHoldsTheGradientsBeyondTheWeightsAllHold) {
  const Devices devices("cuda:0*2");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(1024, 512).bias(false)));
  net->to(devices[0].torch_device());
  const int64_t weight_bytes = 1024 * 512 * 4;
  DataParallel parallel(net, devices);
  const auto train = [&] {
    parallel(torch::ones({8, 1024}, devices[0].torch_device())).sum().backward();
    devices.synchronize();
  };
  // cuBLAS takes a workspace for each stream from the same allocator and keeps it: warm up first.
  train();
  net->zero_grad(true);
  const int64_t rest_0 = devices[0].memory().live_bytes;
  const int64_t rest_1 = devices[1].memory().live_bytes;
  EXPECT_GE(rest_0, weight_bytes);
  EXPECT_GE(rest_1, weight_bytes);
  train();
  EXPECT_EQ(devices[0].memory().live_bytes - rest_0, weight_bytes) << "the gradients";
  EXPECT_EQ(devices[1].memory().live_bytes, rest_1);
}

TEST_F(Cuda, BusyTimeIsMeasured) {
  const Devices devices("cuda:0");
  const UseDevice home(devices[0]);
  const auto a = torch::rand({8192, 8192}, devices[0].torch_device());
  const double before = devices[0].busy_seconds();
  for (int i = 0; i < 8; ++i) torch::mm(a, a);
  devices.synchronize();
  EXPECT_GT(devices[0].busy_seconds() - before, 0.01);
}

TEST_F(Cuda, RandomNumbersOfSlotsThatShareAGpuDoNotDependOnTiming) {
  const auto draw = [] {
    const Devices devices("cuda:0*3");
    torch::manual_seed(5);
    std::vector<std::future<torch::Tensor>> running;
    for (int round = 0; round < 3; ++round) {
      for (size_t d = 0; d < devices.size(); ++d) {
        running.push_back(devices[d].submit("draw", [&devices, d] {
          return torch::dropout(torch::ones({256}, devices[d].torch_device()), 0.5, true).cpu();
        }));
      }
    }
    std::vector<torch::Tensor> drawn;
    for (auto& each : running) drawn.push_back(each.get());
    return torch::stack(drawn);
  };
  const auto first = draw();
  EXPECT_TRUE(torch::equal(first, draw()));
  EXPECT_FALSE(torch::equal(first[0], first[1]));
}

TEST_F(Cuda, AFailingReplicaIsNamed) {
  const Devices devices("cuda:0*2");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(4, 4));
  net->to(devices[0].torch_device());
  DataParallel parallel(net, devices);
  test::expect_error(Code::kReplicaFailed, {"replica 0 on cuda:0#0"}, [&] {
    parallel(torch::ones({4, 5}, devices[0].torch_device()));
  });
  net->to(torch::kCPU);
  test::expect_error(Code::kPlacement, {"not on cuda:0#0"},
                     [&] { DataParallel wrong(net, devices); });
}

}  // namespace
}  // namespace lockstep::test::data_parallel_cuda_test
