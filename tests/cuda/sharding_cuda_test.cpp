// Sharded training of ranks that share a GPU gives the weights of one rank alone, in every stage,
// also where the optimizer works on the CPU.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpu_ranks.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/optim.hpp"

namespace lockstep::test::sharding_cuda_test {
namespace {

using CudaSharding = GpuTest;

constexpr int kSteps = 4;
constexpr int64_t kRows = 48;
constexpr int64_t kWidth = 64;

torch::Tensor wave(torch::IntArrayRef sizes, double phase) {
  return torch::arange(c10::multiply_integers(sizes), torch::kDouble)
      .mul(0.61)
      .add(phase)
      .cos()
      .view(sizes);
}

torch::nn::Sequential make_net() {
  torch::nn::Sequential net;
  for (int i = 0; i < 3; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  double phase = 0;
  for (auto& each : net->parameters()) each.copy_(wave(each.sizes(), phase += 1).div(kWidth));
  net->to(kGpu);
  return net;
}

torch::Tensor rows_of_step(int step, int micro) {
  return wave({kRows, kWidth}, step + 0.3 * micro).to(kGpu);
}

std::vector<torch::Tensor> weights_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> weights;
  for (const auto& each : module.parameters()) weights.push_back(each.detach().cpu());
  return weights;
}

// Two micro-steps for each update.
std::vector<torch::Tensor> train_alone() {
  auto net = make_net();
  AdamW optimizer(net->parameters(), {.lr = 0.01});
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      net->forward(rows_of_step(step, micro)).pow(2).mean().div(2).backward();
    }
    optimizer.step(StepExtras{.max_norm = 0.05, .zero_grad = true});
  }
  return weights_of(*net);
}

void expect_stages_like(const std::vector<torch::Tensor>& wanted, int size, bool offload) {
  for (const ShardStage stage :
       {ShardStage::kOptimizer, ShardStage::kGradients, ShardStage::kParameters}) {
    run_on_gpu(size, [&](const Communicator& comm, Device&) {
      auto net = make_net();
      FullyShardedDataParallel fsdp(
          net, comm, {.stage = stage, .min_unit_bytes = 0, .offload_optimizer = offload});
      AdamW optimizer(fsdp.parameters(), {.lr = 0.01});
      for (int step = 0; step < kSteps; ++step) {
        for (int micro = 0; micro < 2; ++micro) {
          std::optional<NoSync> no_sync;
          if (micro == 0) no_sync.emplace(fsdp);
          const auto mine = rows_of_step(step, micro).chunk(size)[static_cast<size_t>(comm.rank())];
          fsdp(mine).pow(2).mean().div(2).backward();
        }
        optimizer.step(StepExtras{.max_norm = 0.05, .zero_grad = true});
      }
      const GatheredParameters gathered(fsdp);
      const auto found = weights_of(*net);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(torch::allclose(found[i], wanted[i], 1e-9, 1e-11))
            << "stage " << static_cast<int>(stage) << ", weight " << i << " is off by "
            << (found[i] - wanted[i]).abs().max().item<double>();
      }
    });
  }
}

TEST_F(CudaSharding, EveryStageTrainsAsOneRank) {
  const auto wanted = train_alone();
  for (const int size : {1, 2, 3, 4}) expect_stages_like(wanted, size, /*offload=*/false);
}

TEST_F(CudaSharding, TheOptimizerMayWorkOnTheCpu) {
  expect_stages_like(train_alone(), 2, /*offload=*/true);
}

}  // namespace
}  // namespace lockstep::test::sharding_cuda_test
