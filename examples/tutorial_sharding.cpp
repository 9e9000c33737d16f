// A model whose optimizer state, gradients and parameters are divided over the ranks: `lockstep run
// -n 4 tutorial_sharding`. Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "lockstep/lockstep.hpp"

int train(int, char**) {
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  torch::manual_seed(0);  // the same weights in every run
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) {
    net->push_back(torch::nn::Linear(128, 128));
    net->push_back(torch::nn::Tanh());
  }
  net->to(world.device().torch_device());

  // Stage 3 divides everything. Each layer is a unit: gathered when it is used, then freed.
  lockstep::FullyShardedDataParallel fsdp(
      net, world.comm(), {.stage = lockstep::ShardStage::kParameters, .min_unit_bytes = 0});
  lockstep::AdamW optimizer(fsdp.parameters(), {.lr = 3e-3});  // state of this rank's shards only

  torch::manual_seed(1 + static_cast<uint64_t>(world.rank()));
  const auto x = torch::randn({32, 128}, world.device().torch_device());  // this rank's own rows
  std::vector<double> losses;
  for (int step = 0; step < 20; ++step) {
    const auto loss = torch::mse_loss(fsdp(x), torch::sin(x));
    loss.backward();  // leaves the averaged gradients of this rank's shards
    optimizer.step(lockstep::StepExtras{.max_norm = 1.0, .zero_grad = true});  // the whole norm
    losses.push_back(loss.item<double>());
  }

  int64_t own = 0, all = 0;
  for (const auto& shard : fsdp.parameters()) own += shard.numel();
  {
    const lockstep::GatheredParameters gathered(fsdp);  // whole on every rank, to evaluate or save
    for (const auto& weight : net->parameters()) all += weight.numel();
  }
  if (world.rank() == 0) {
    std::printf("rank 0 keeps and updates %ld of %ld weights; loss %.4f, then %.4f\n", own, all,
                losses.front(), losses.back());
  }
  return losses.back() < 0.9 * losses.front() ? 0 : 1;
}

int main(int argc, char** argv) {
  return lockstep::run_program(train, argc, argv);
}
