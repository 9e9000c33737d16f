#include <gtest/gtest.h>

#include "base/process.hpp"
#include "same_bits_support.hpp"

namespace lockstep::test::same_bits_sharding_test {
namespace {

constexpr int64_t kRows = 48;

struct Recipe {
  std::string model = "mlp";
  ShardStage stage = ShardStage::kParameters;
  bool share_on_host = true;
  bool scaled = false;
  int64_t shards = 8;
  int64_t steps = 20;
  std::string folder = {};
};

Trained train_recipe(const Recipe& recipe, const Communicator& comm) {
  auto net = net_of(recipe.model);
  FullyShardedDataParallel fsdp(net, comm,
                                {.stage = recipe.stage,
                                 .min_unit_bytes = 1,
                                 .share_on_host = recipe.share_on_host,
                                 .virtual_shards = recipe.shards});
  AdamW optimizer(fsdp.parameters(), {.lr = 0.01});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 5, .enabled = recipe.scaled});
  int64_t first = 0;
  std::optional<Checkpoint> checkpoint;
  if (!recipe.folder.empty()) {
    checkpoint.emplace(recipe.folder, comm, CheckpointOptions{.every = 10});
    checkpoint->add("model", fsdp).add("optimizer", optimizer, fsdp).add("scaler", scaler);
    first = checkpoint->resume();
  }
  Trained trained;
  for (int64_t step = first; step < recipe.steps; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro == 0) no_sync.emplace(fsdp);
      const auto [x, y] = global_batch(2 * step + micro, kRows);
      const auto loss =
          fsdp.backward_parts(block_of_rank(x, comm), block_of_rank(y, comm),
                              [&](const torch::Tensor& rows, const torch::Tensor& wanted) {
                                return torch::mse_loss(fsdp(rows), wanted) / 2;
                              },
                              {.scaler = &scaler});
      trained.losses.push_back(loss.item<double>());
    }
    scaler.step(optimizer, {.max_norm = 0.05, .zero_grad = true});
    scaler.update();
    if (checkpoint) checkpoint->step(step + 1);
  }
  if (checkpoint) checkpoint->finish();
  trained.scale = scaler.get_scale();
  const GatheredParameters gathered(fsdp);
  trained.add(*net);
  return trained;
}

void expect_same_on_ranks(const Recipe& recipe, const std::vector<int>& ranks,
                          const std::string& what) {
  expect_same_on(
      ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); }, what);
}

TEST(SameBitsSharded, EveryStageOnTwoFourAndEightRanks) {
  for (const ShardStage stage :
       {ShardStage::kOptimizer, ShardStage::kGradients, ShardStage::kParameters}) {
    const std::string name = "stage " + std::to_string(static_cast<int>(stage));
    expect_same_on_ranks({.stage = stage, .share_on_host = false}, {2, 4, 8}, name);
    expect_same_on_ranks({.model = "cnn", .stage = stage, .scaled = true}, {2, 4}, name + ", cnn");
  }
}

TEST(SameBitsSharded, ThreeAndSixRanks) {
  expect_same_on_ranks({.model = "transformer", .shards = 6, .steps = 10}, {2, 3, 6},
                       "transformer");
}

TEST(SameBitsSharded, StagesAgree) {
  torch::manual_seed(7);
  const auto train = [](ShardStage stage) {
    return train_on(2, [stage](const Communicator& comm) {
      return train_recipe({.stage = stage, .steps = 10}, comm);
    });
  };
  const Trained first = train(ShardStage::kOptimizer);
  expect_same_run(train(ShardStage::kGradients), first, "stage 2");
  expect_same_run(train(ShardStage::kParameters), first, "stage 3");
}

TEST(SameBitsSharded, AfterAResumeWithAnotherNumberOfRanks) {
  torch::manual_seed(7);
  const Recipe recipe{.scaled = true};
  const Trained whole =
      train_on(1, [&](const Communicator& comm) { return train_recipe(recipe, comm); });
  const ScratchFolder scratch;
  Recipe part = recipe;
  part.folder = scratch.file("run");
  part.steps = 10;
  train_on(4, [&](const Communicator& comm) { return train_recipe(part, comm); });
  part.steps = recipe.steps;
  torch::manual_seed(7);
  Trained resumed = train_on(2, [&](const Communicator& comm) { return train_recipe(part, comm); });
  resumed.losses.insert(resumed.losses.begin(), whole.losses.begin(),
                        whole.losses.end() - static_cast<ptrdiff_t>(resumed.losses.size()));
  expect_same_run(resumed, whole, "resumed");
  set_resumed_steps(0);
}

}  // namespace
}  // namespace lockstep::test::same_bits_sharding_test
