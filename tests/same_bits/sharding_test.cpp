#include <gtest/gtest.h>

#include "comm/network/transport_loader.hpp"
#include "same_bits_support.hpp"

// FullyShardedDataParallel with virtual shards, in every stage of ZeRO.

namespace lockstep::test::same_bits_sharding_test {
namespace {

// How a run trains, with clipping by the whole model's norm.
struct Recipe {
  std::string model = "mlp";
  int64_t accum_steps = 2;
  ShardStage stage = ShardStage::kParameters;
  bool share_on_host = true;
  bool scaled = false;
  bool low_precision = false;
  bool masters = false;
  bool doubles = false;         // weights that show the last bits of a norm
  bool unscales_first = false;  // and clips by clip_grad_norm_()
  int64_t shards = 8;
  int64_t rows = 48;
  int64_t steps = 50;
  std::string folder = {};  // of checkpoints
  int64_t overflow_at = 0;  // the last part's loss is infinite in this step
};

constexpr double kMaxNorm = 0.05;

void update(const Recipe& recipe, GradScaler& scaler, AdamW& optimizer,
            const std::vector<torch::Tensor>& parameters) {
  if (!recipe.unscales_first) {
    scaler.step(optimizer, {.max_norm = kMaxNorm, .zero_grad = true});
  } else {
    scaler.unscale_(optimizer);
    lockstep::clip_grad_norm_(parameters, kMaxNorm);
    scaler.step(optimizer, {.zero_grad = true});
  }
  scaler.update();
}

Trained train_recipe(const Recipe& recipe, const Communicator& comm) {
  auto net = net_of(recipe.model);
  if (recipe.doubles) net->to(torch::kDouble);
  std::optional<MasterWeights> masters;
  if (recipe.masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kBFloat16});
  FullyShardedDataParallel fsdp(net, comm,
                                {.stage = recipe.stage,
                                 .min_unit_bytes = 1,
                                 .share_on_host = recipe.share_on_host,
                                 .virtual_shards = recipe.shards});
  AdamW optimizer(fsdp.parameters(), {.lr = 0.01, .masters = masters});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 10, .enabled = recipe.scaled});
  int64_t first = 0;
  std::optional<Checkpoint> checkpoint;
  if (!recipe.folder.empty()) {
    checkpoint.emplace(recipe.folder, comm, CheckpointOptions{.every = 10});
    checkpoint->add("model", fsdp).add("optimizer", optimizer, fsdp).add("scaler", scaler);
    first = checkpoint->resume();
  }
  const auto target_dtype = recipe.doubles ? torch::kDouble : torch::kFloat;
  const auto input_dtype = recipe.masters ? torch::kBFloat16 : target_dtype;
  Trained trained;
  for (int64_t step = first; step < recipe.steps; ++step) {
    for (int64_t micro = 0; micro < recipe.accum_steps; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < recipe.accum_steps) no_sync.emplace(fsdp);
      const auto [x, y] = global_batch(step * recipe.accum_steps + micro, recipe.rows);
      const auto rows_x = block_of_rank(x, comm);
      const auto rows_y = block_of_rank(y, comm).to(target_dtype);
      const auto loss = fsdp.backward_parts(
          [&](const BatchPart& part) {
            const Autocast amp(torch::kCPU, torch::kBFloat16, recipe.low_precision);
            const auto input = part.rows_of(rows_x).to(input_dtype);
            const auto wanted = part.rows_of(rows_y);
            const auto error = torch::mse_loss(fsdp(input).to(wanted.scalar_type()), wanted);
            const bool spoiled = step + 1 == recipe.overflow_at && part.index + 1 == part.count;
            return error * (spoiled ? INFINITY : 0.5);
          },
          {.scaler = &scaler});
      if (step + 1 != recipe.overflow_at) trained.losses.push_back(loss.item<double>());
    }
    update(recipe, scaler, optimizer, fsdp.parameters());
    if (checkpoint) {
      EXPECT_TRUE(checkpoint->step(step + 1));
    }
  }
  if (checkpoint) checkpoint->finish();
  trained.scale = scaler.get_scale();
  trained.skipped = static_cast<int64_t>(scaler.skipped_steps().size());
  const GatheredParameters gathered(fsdp);
  trained.add(*net);
  return trained;
}

Trained expect_same_on_ranks(const Recipe& recipe, const std::vector<int>& ranks,
                             const std::string& what, const RunRanks& run = run_ranks) {
  const Trained alone = expect_same_on(
      ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); }, what, run);
  const torch::Tensor before = net_of(recipe.model)->parameters()[0].detach();
  EXPECT_FALSE(torch::allclose(alone.tensors[0].second.to(torch::kFloat), before, 1e-3, 1e-3))
      << what << " trains";
  EXPECT_EQ(alone.skipped, recipe.overflow_at > 0 ? 1 : 0) << what;
  return alone;
}

TEST(SameBitsSharded, EveryStageOnTwoFourAndEightRanks) {
  std::vector<Trained> alone;
  for (const ShardStage stage :
       {ShardStage::kOptimizer, ShardStage::kGradients, ShardStage::kParameters}) {
    const std::string name = "stage " + std::to_string(static_cast<int>(stage));
    alone.push_back(expect_same_on_ranks({.accum_steps = 1, .stage = stage}, {2, 4, 8}, name));
    expect_same_run(alone.back(), alone.front(), name + " and stage 1");
    const Recipe own_copies{.model = "cnn",
                            .stage = stage,
                            .share_on_host = false,
                            .scaled = true,
                            .steps = 15,
                            .overflow_at = 5};
    expect_same_on_ranks(own_copies, {4}, name + ", cnn, a copy for each rank");
  }
}

TEST(SameBitsSharded, LowPrecision) {
  const Recipe amp{.model = "transformer", .scaled = true, .low_precision = true, .steps = 15};
  expect_same_on_ranks(amp, {2}, "bf16 products");
  const Recipe masters{.scaled = true, .masters = true, .unscales_first = true, .steps = 20};
  expect_same_on_ranks(masters, {2, 4}, "bf16 weights");
}

TEST(SameBitsSharded, ThirtyPartsOnTwoThreeAndFiveRanks) {
  const Recipe mlp{.doubles = true, .shards = 30, .rows = 60, .steps = 10};
  expect_same_on_ranks(mlp, {2, 3, 5}, "mlp");
  const Recipe transformer{.model = "transformer",
                           .stage = ShardStage::kGradients,
                           .shards = 15,
                           .rows = 30,
                           .steps = 10};
  expect_same_on_ranks(transformer, {3, 5}, "transformer");
}

TEST(SameBitsSharded, OverGloo) {
  if (find_module("lockstep-gloo.so").empty()) GTEST_SKIP() << "lockstep-gloo.so was not built";
  const Recipe cnn{.model = "cnn", .scaled = true, .steps = 20};
  expect_same_on_ranks(cnn, {4}, "cnn", run_gloo_ranks);
  const Recipe six{.stage = ShardStage::kOptimizer, .shards = 6, .steps = 10};
  expect_same_on_ranks(six, {3}, "6 parts", run_gloo_ranks);
}

TEST(SameBitsSharded, AfterAResumeWithAnotherNumberOfRanks) {
  const Recipe recipe{.model = "cnn", .scaled = true};
  expect_same_after_resume(recipe, 20, {{4, 1}, {1, 2}}, train_recipe, "");
}

// One batch, one update without a clip: what DistributedDataParallel computes.
TEST(SameBitsSharded, GradientsAreThoseOfDistributedDataParallel) {
  const auto [x, y] = global_batch(0, 24);
  const auto train = [&, x = x, y = y](auto& wrapper, const Communicator& comm) {
    Sgd optimizer(wrapper.parameters(), {.lr = 0.1});
    for (int64_t step = 0; step < 3; ++step) {
      wrapper.backward_parts(block_of_rank(x, comm), block_of_rank(y, comm),
                             [&](const auto& rows, const auto& wanted) {
                               return torch::mse_loss(wrapper(rows), wanted);
                             });
      optimizer.step({.zero_grad = true});
    }
  };
  torch::manual_seed(7);
  const Trained expected = train_on(1, [&](const Communicator& comm) {
    auto net = net_of("cnn");
    DistributedDataParallel ddp(net, comm, {.virtual_shards = 6});
    train(ddp, comm);
    Trained trained;
    trained.add(*net);
    return trained;
  });
  const Trained sharded = train_on(3, [&](const Communicator& comm) {
    auto net = net_of("cnn");
    FullyShardedDataParallel fsdp(net, comm, {.virtual_shards = 6});
    train(fsdp, comm);
    const GatheredParameters gathered(fsdp);
    Trained trained;
    trained.add(*net);
    return trained;
  });
  expect_same_run(sharded, expected, "sharded over three ranks");
}

}  // namespace
}  // namespace lockstep::test::same_bits_sharding_test
