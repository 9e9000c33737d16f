// Trains three layers sharded over the ranks it was started with, in float64, and prints the mean
// loss of every step: sharding_train STAGE OPTIMIZER MICRO_STEPS shared|copies, where ranks share
// one copy of the weights or have copies of their own.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/lockstep.hpp"
#include "wave.hpp"

namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<torch::Tensor> shards) {
  if (name == "sgd") {
    return std::make_unique<lockstep::Sgd>(
        std::move(shards), lockstep::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  }
  return std::make_unique<lockstep::AdamW>(std::move(shards), lockstep::AdamWOptions{.lr = 0.01});
}

int train(int count, char** words) {
  if (count != 5) return 2;
  const int micro_steps = std::stoi(words[3]);
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  torch::nn::Sequential net(torch::nn::Linear(6, 20), torch::nn::Tanh(), torch::nn::Linear(20, 20),
                            torch::nn::Tanh(), torch::nn::Linear(20, 3));
  net->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& each : net->parameters()) each.copy_(wave(each.sizes(), phase += 0.7) * 0.3);
  }
  lockstep::FullyShardedDataParallel fsdp(
      net, world.comm(),
      {.stage = static_cast<lockstep::ShardStage>(std::stoi(words[1])),
       .min_unit_bytes = 0,
       .share_on_host = std::string(words[4]) == "shared"});
  auto optimizer = make_optimizer(words[2], fsdp.parameters());
  for (int step = 0; step < 8; ++step) {
    const torch::Tensor mean = torch::zeros({1}, torch::kDouble);
    optimizer->zero_grad();
    for (int micro = 0; micro < micro_steps; ++micro) {
      const auto mine = [&](torch::IntArrayRef sizes, double phase) {
        const auto batch = wave(sizes, phase + step + 0.1 * micro);
        return batch.chunk(world.size(), 0)[static_cast<size_t>(world.rank())];
      };
      std::optional<lockstep::NoSync> no_sync;
      if (micro + 1 < micro_steps) no_sync.emplace(fsdp);
      const auto loss = torch::mse_loss(fsdp(mine({12, 6}, 0.2)), mine({12, 3}, 0.5)) / micro_steps;
      loss.backward();
      mean.add_(loss.detach());
    }
    if (std::string(words[2]) == "clipped") lockstep::clip_grad_norm_(fsdp.parameters(), 0.05);
    optimizer->step();
    world.comm().all_reduce(mean, lockstep::ReduceOp::kMean);
    if (world.rank() == 0) std::printf("%.17g\n", mean.item<double>());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
