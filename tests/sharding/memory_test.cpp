// Bytes per weight as the ZeRO paper gives them, counted by the logical devices' accounts.
#include <gtest/gtest.h>

#include "lockstep/device.hpp"
#include "lockstep/master_weights.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::memory_test {
namespace {

constexpr int64_t kWidth = 64;
constexpr int64_t kLayers = 3;
constexpr int64_t kWeights = kLayers * kWidth * kWidth;

torch::nn::Sequential layers(int64_t width = kWidth, int64_t count = kLayers) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  fill_weights(*net);
  return net;
}

// Live bytes of each rank's device after a step with AdamW, before its gradients are dropped.
std::vector<int64_t> bytes_after_step(ShardStage stage, int ranks, bool masters,
                                      bool shared = false) {
  const Devices devices("cpu:" + std::to_string(ranks));
  std::vector<int64_t> bytes(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](const Communicator& comm) {
    Device& device = devices[static_cast<size_t>(comm.rank())];
    const UseDevice home(device);
    const int64_t before = device.memory().live_bytes;
    std::optional<ChargeHost> on_host(std::in_place);  // the whole model is made there
    auto net = layers();
    std::optional<MasterWeights> held;
    if (masters) held.emplace(*net, MasterWeightsOptions{.dtype = torch::kBFloat16});
    const auto x = wave({4, kWidth}, 0).to(masters ? torch::kBFloat16 : torch::kFloat);
    on_host.reset();
    FullyShardedDataParallel fsdp(net, comm,
                                  {.stage = stage, .min_unit_bytes = 0, .share_on_host = shared});
    AdamW optimizer(fsdp.parameters(), {.masters = held});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      fsdp(x).pow(2).mean().backward();
      optimizer.step();
    }
    bytes[static_cast<size_t>(comm.rank())] = device.memory().live_bytes - before;
    comm.barrier();
  });
  return bytes;
}

TEST(ShardedMemory, MasterWeightsTakeThePapersBytes) {
  for (const int ranks : {1, 2, 4}) {
    const std::map<ShardStage, int64_t> wanted = {
        {ShardStage::kOptimizer, 4 * kWeights + 12 * kWeights / ranks},
        {ShardStage::kGradients, 2 * kWeights + 14 * kWeights / ranks},
        {ShardStage::kParameters, 16 * kWeights / ranks}};
    for (const auto& [stage, bytes] : wanted) {
      for (const int64_t each : bytes_after_step(stage, ranks, true)) {
        EXPECT_EQ(each, bytes) << "stage " << static_cast<int>(stage) << " on " << ranks;
      }
    }
  }
}

TEST(ShardedMemory, Float32TakesTheSameInTotal) {
  for (const int ranks : {1, 2, 4}) {
    const std::map<ShardStage, int64_t> wanted = {
        {ShardStage::kOptimizer, 8 * kWeights + 8 * kWeights / ranks},
        {ShardStage::kGradients, 4 * kWeights + 12 * kWeights / ranks},
        {ShardStage::kParameters, 16 * kWeights / ranks}};
    for (const auto& [stage, bytes] : wanted) {
      for (const int64_t each : bytes_after_step(stage, ranks, false)) {
        EXPECT_EQ(each, bytes) << "stage " << static_cast<int>(stage) << " on " << ranks;
      }
    }
  }
}

TEST(ShardedMemory, OneCopyIsChargedInShares) {
  for (const int64_t each : bytes_after_step(ShardStage::kParameters, 4, true, true)) {
    EXPECT_EQ(each, 16 * kWeights / 4);
  }
}

// 2 MiB of weights: training takes 8 MiB, and a device has 5.
TEST(ShardedMemory, ModelThatDoesNotFitTrainsOverFour) {
  constexpr int64_t kLimit = int64_t{5} << 20;
  constexpr int64_t kWide = 256;
  constexpr int64_t kDeep = 8;
  const auto x = wave({8, kWide}, 0).to(torch::kFloat);
  const auto deep = [] {
    auto net = layers(kWide, kDeep);
    const torch::NoGradGuard no_grad;
    for (auto& each : net->parameters()) each.mul_(0.2);  // so that values do not grow by layers
    return net;
  };
  std::vector<double> wanted;
  const auto train = [&](torch::nn::Sequential net, std::vector<double>& losses) {
    AdamW optimizer(net->parameters(), {.lr = 1e-3});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(net->forward(x), torch::sin(x));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
  };
  train(deep(), wanted);
  {
    const Devices devices("cpu:1");
    devices[0].set_memory_limit(kLimit);
    const UseDevice home(devices[0]);
    std::vector<double> losses;
    expect_error(Code::kOutOfMemory, {"MiB", "FullyShardedDataParallel"},
                 [&] { train(deep(), losses); });
  }
  const Devices devices("cpu:4");
  for (size_t i = 0; i < 4; ++i) devices[i].set_memory_limit(kLimit);
  run_ranks(4, [&](const Communicator& comm) {
    const UseDevice home(devices[static_cast<size_t>(comm.rank())]);
    std::optional<ChargeHost> on_host(std::in_place);
    auto net = deep();
    on_host.reset();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0, .share_on_host = false});
    AdamW optimizer(fsdp.parameters(), {.lr = 1e-3});
    for (size_t step = 0; step < wanted.size(); ++step) {
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(fsdp(own_rows(x, comm)), torch::sin(own_rows(x, comm)));
      loss.backward();
      optimizer.step();
      const auto mean = loss.detach().clone().view({1});
      comm.all_reduce(mean, ReduceOp::kMean);
      EXPECT_NEAR(mean.item<double>(), wanted[step], 1e-4 * wanted[step]);
    }
    EXPECT_LE(devices[static_cast<size_t>(comm.rank())].memory().peak_bytes, kLimit);
  });
}

TEST(ShardedMemory, MasterWeightsTrainAsWithoutSharding) {
  const auto x = wave({12, kWidth}, 0).to(torch::kBFloat16);
  // The mean of the ranks' rounded gradients is not the rounded gradient of all rows: every rank
  // gets all rows here, so that the results must be equal to the last bit.
  auto one = layers();
  MasterWeights masters(*one, {.dtype = torch::kBFloat16});
  AdamW alone(one->parameters(), {.lr = 1e-3, .masters = masters});
  for (int step = 0; step < 3; ++step) {
    alone.zero_grad();
    one->forward(x).pow(2).mean().backward();
    alone.step();
  }
  for (const ShardStage stage : kStages) {
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](const Communicator& comm) {
        auto net = layers();
        MasterWeights held(*net, {.dtype = torch::kBFloat16});
        FullyShardedDataParallel fsdp(net, comm, {.stage = stage, .min_unit_bytes = 0});
        AdamW optimizer(fsdp.parameters(), {.lr = 1e-3, .masters = held});
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          fsdp(x).pow(2).mean().backward();
          optimizer.step();
        }
        EXPECT_EQ(held.bytes(), 4 * kWeights / ranks);
        EXPECT_TRUE(torch::equal(whole_weights(fsdp), weights_of(*one)))
            << "stage " << static_cast<int>(stage) << " on " << ranks;
      });
    }
  }
}

}  // namespace
}  // namespace lockstep::test::memory_test
