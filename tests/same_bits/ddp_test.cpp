#include <gtest/gtest.h>

#include "comm/network/transport_loader.hpp"
#include "lockstep/split.hpp"
#include "same_bits_support.hpp"

namespace lockstep::test::same_bits_ddp_test {
namespace {

constexpr int64_t kRows = 48;

// How a run trains.
struct Recipe {
  std::string model = "mlp";
  bool adamw = false;
  int64_t accum_steps = 1;
  bool low_precision = false;
  bool scaled = false;
  bool masters = false;
  std::optional<double> max_norm = {};
  int64_t shards = 8;
  int64_t steps = 50;
  std::string folder = {};  // of checkpoints
  int64_t overflow_at = 0;  // the last part's loss is infinite in this step
};

Trained train_recipe(const Recipe& recipe, const Communicator& comm) {
  auto net = net_of(recipe.model);
  std::optional<MasterWeights> masters;
  if (recipe.masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kBFloat16});
  DistributedDataParallel ddp(net, comm, {.virtual_shards = recipe.shards});
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (recipe.adamw) {
    optimizer =
        std::make_unique<AdamW>(ddp.parameters(), AdamWOptions{.lr = 0.01, .masters = masters});
  } else {
    optimizer = std::make_unique<Sgd>(ddp.parameters(),
                                      SgdOptions{.lr = 0.05, .momentum = 0.9, .masters = masters});
  }
  GradScaler scaler({.init_scale = 1024, .growth_interval = 10, .enabled = recipe.scaled});
  int64_t first = 0;
  std::optional<Checkpoint> checkpoint;
  if (!recipe.folder.empty()) {
    checkpoint.emplace(recipe.folder, comm, CheckpointOptions{.every = 10});
    checkpoint->add("model", *net).add("optimizer", *optimizer, *net).add("scaler", scaler);
    first = checkpoint->resume();
  }
  Trained trained;
  for (int64_t step = first; step < recipe.steps; ++step) {
    for (int64_t micro = 0; micro < recipe.accum_steps; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < recipe.accum_steps) no_sync.emplace(ddp);
      const auto [x, y] = global_batch(step * recipe.accum_steps + micro, kRows);
      const auto rows_x = block_of_rank(x, comm);
      const auto rows_y = block_of_rank(y, comm);
      const auto loss = ddp.backward_parts(
          [&](const BatchPart& part) {
            const Autocast amp(torch::kCPU, torch::kBFloat16, recipe.low_precision);
            const auto input =
                part.rows_of(rows_x).to(recipe.masters ? torch::kBFloat16 : torch::kFloat);
            const auto error = torch::mse_loss(ddp(input).to(torch::kFloat), part.rows_of(rows_y));
            const bool spoiled = step + 1 == recipe.overflow_at && part.index + 1 == part.count;
            return error * (spoiled ? INFINITY : 1.0) / static_cast<double>(recipe.accum_steps);
          },
          {.scaler = &scaler});
      if (step + 1 != recipe.overflow_at) trained.losses.push_back(loss.item<double>());
    }
    scaler.step(*optimizer, {.max_norm = recipe.max_norm, .zero_grad = true});
    scaler.update();
    if (checkpoint) {
      EXPECT_TRUE(checkpoint->step(step + 1));
    }
  }
  if (checkpoint) checkpoint->finish();
  trained.scale = scaler.get_scale();
  trained.skipped = static_cast<int64_t>(scaler.skipped_steps().size());
  if (masters) masters->restore(*net);
  trained.add(*net);
  return trained;
}

void expect_same_on_ranks(const Recipe& recipe, const std::vector<int>& ranks,
                          const std::string& what, const RunRanks& run = run_ranks) {
  const Trained alone = expect_same_on(
      ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); }, what, run);
  const torch::Tensor before = net_of(recipe.model)->parameters()[0].detach();
  EXPECT_FALSE(torch::allclose(alone.tensors[0].second, before, 1e-3, 1e-3)) << what << " trains";
  EXPECT_EQ(alone.skipped, recipe.overflow_at > 0 ? 1 : 0) << what;
}

TEST(SameBits, SgdOnOneTwoFourAndEightRanks) {
  for (const char* model : {"mlp", "cnn", "transformer"}) {
    expect_same_on_ranks({.model = model, .max_norm = 0.5}, {2, 4, 8}, model);
  }
}

TEST(SameBits, AdamWWithAccumulationAndAmp) {
  expect_same_on_ranks({.adamw = true,
                        .accum_steps = 3,
                        .low_precision = true,
                        .scaled = true,
                        .max_norm = 0.3,
                        .overflow_at = 5},
                       {2, 4, 8}, "mlp in bf16, scaled");
  expect_same_on_ranks(
      {.model = "cnn", .adamw = true, .accum_steps = 2, .low_precision = true, .max_norm = 0.3},
      {2, 8}, "cnn in bf16");
  expect_same_on_ranks(
      {.model = "transformer", .accum_steps = 2, .scaled = true, .max_norm = 0.5, .overflow_at = 9},
      {4}, "transformer, scaled");
}

TEST(SameBits, MasterWeights) {
  expect_same_on_ranks({.adamw = true, .scaled = true, .masters = true}, {2, 4}, "bf16 weights");
}

// Ranks that are no power of two: some exchange sums of single parts.
TEST(SameBits, ThreeFiveAndSixRanks) {
  expect_same_on_ranks({.max_norm = 0.5, .shards = 6, .steps = 20}, {2, 3, 6}, "6 parts");
  expect_same_on_ranks({.model = "cnn", .shards = 12, .steps = 20}, {3, 4, 6}, "12 parts");
  const auto of_five = [](const Communicator& comm) {
    auto net = net_of("mlp");
    DistributedDataParallel ddp(net, comm, {.virtual_shards = 15});
    Sgd optimizer(ddp.parameters(), {.lr = 0.05});
    Trained trained;
    for (int64_t step = 0; step < 20; ++step) {
      const auto [x, y] = global_batch(step, 45);
      const auto loss = ddp.backward_parts(
          block_of_rank(x, comm), block_of_rank(y, comm),
          [&](const auto& rows, const auto& wanted) { return torch::mse_loss(ddp(rows), wanted); });
      trained.losses.push_back(loss.item<double>());
      optimizer.step({.zero_grad = true});
    }
    trained.add(*net);
    return trained;
  };
  expect_same_on({3, 5}, of_five, "15 parts");
}

TEST(SameBits, OverGloo) {
  if (find_module("lockstep-gloo.so").empty()) GTEST_SKIP() << "lockstep-gloo.so was not built";
  for (const char* model : {"mlp", "cnn"}) {
    const Recipe recipe{
        .model = model, .adamw = true, .accum_steps = 2, .scaled = true, .max_norm = 0.5};
    expect_same_on_ranks(recipe, {2, 8}, std::string(model) + " over Gloo", run_gloo_ranks);
  }
  expect_same_on_ranks({.shards = 6, .steps = 10}, {2, 3}, "6 parts over Gloo", run_gloo_ranks);
}

TEST(SameBits, AfterAResumeWithAnotherNumberOfRanks) {
  for (const char* model : {"mlp", "cnn"}) {
    const Recipe recipe{
        .model = model, .adamw = true, .accum_steps = 2, .scaled = true, .max_norm = 0.5};
    expect_same_after_resume(recipe, 20, {{4, 2}, {1, 8}, {2, 1}}, train_recipe,
                             std::string(model) + " ");
  }
}

// The gradient is the whole batch's, and that of part p counts by its weight.
TEST(SameBits, GradientsAreThoseOfTheWholeBatch) {
  const auto [x, y] = global_batch(0, 10);
  auto plain =
      torch::nn::Sequential(torch::nn::Linear(6, 24), torch::nn::Tanh(), torch::nn::Linear(24, 3));
  fill_in_waves(*plain);
  torch::mse_loss(plain->forward(x), y).backward();
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&, x = x, y = y](const Communicator& comm) {
      auto net = torch::nn::Sequential(torch::nn::Linear(6, 24), torch::nn::Tanh(),
                                       torch::nn::Linear(24, 3));
      fill_in_waves(*net);
      DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
      const auto all = tensor_split_rows(10, 4);  // 3, 3, 2, 2
      const auto loss = ddp.backward_parts([&](const BatchPart& part) {
        int64_t first = 0;
        for (int64_t i = 0; i < part.index; ++i) first += all[static_cast<size_t>(i)];
        const int64_t count = all[static_cast<size_t>(part.index)];
        ddp.set_weight(static_cast<double>(count));
        return torch::mse_loss(ddp(x.narrow(0, first, count)), y.narrow(0, first, count));
      });
      expect_close(loss, torch::mse_loss(plain->forward(x), y).detach(), "loss");
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        expect_close(net->parameters()[i].grad(), plain->parameters()[i].grad(), "gradient");
      }
    });
  }
}

TEST(SameBits, GradientsAddToThoseThatAreThere) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = net_of("cnn");
    DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
    const auto step = [&] {
      const auto [x, y] = global_batch(0, 16);
      ddp.backward_parts(block_of_rank(x, comm), block_of_rank(y, comm),
                         [&](const auto& rows, const auto& wanted) {
                           net->eval();  // no dropout and no statistics of the batch
                           return torch::mse_loss(ddp(rows), wanted);
                         });
    };
    step();
    std::vector<torch::Tensor> kept, once;
    for (const auto& each : net->parameters()) {
      kept.push_back(each.grad());
      once.push_back(each.grad().clone());
    }
    step();
    for (size_t i = 0; i < once.size(); ++i) {
      EXPECT_TRUE(torch::equal(net->parameters()[i].grad(), once[i] * 2)) << i;
    }
    net->zero_grad(/*set_to_none=*/true);
    step();
    for (size_t i = 0; i < once.size(); ++i) {
      EXPECT_TRUE(torch::equal(net->parameters()[i].grad(), once[i])) << i;
      EXPECT_TRUE(torch::equal(kept[i], once[i] * 2)) << "a kept gradient keeps its values";
    }
  });
}

// A micro-step that ends with an error leaves what the one before it has accumulated.
TEST(SameBits, AMicroStepThatFailsTakesNoGradientsAway) {
  for (const bool in_backward : {false, true}) {
    run_ranks(2, [&](const Communicator& comm) {
      torch::nn::Linear net(2, 2);
      DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
      const auto step = [&](bool fails) {
        ddp.backward_parts([&](const BatchPart& part) {
          const auto loss = ddp(torch::ones({3, 2})).sum() * static_cast<double>(part.index + 1);
          if (fails && part.local_index == 0) {
            if (in_backward) loss.backward();
            throw Error(Code::kUsage, "planted", "none");
          }
          return loss;
        });
      };
      step(false);
      const auto once = net->weight.grad().clone();
      expect_error(Code::kUsage, {"planted"}, [&] { step(true); });
      ASSERT_TRUE(net->weight.grad().defined());
      EXPECT_TRUE(torch::equal(net->weight.grad(), once));
      step(false);
      EXPECT_TRUE(torch::equal(net->weight.grad(), once * 2));
    });
  }
}

// A part without rows has the weight 0, and its loss, a mean over nothing, does not count.
TEST(SameBits, APartWithoutRowsDoesNotCount) {
  run_ranks(2, [](const Communicator& comm) {
    torch::nn::Linear net(6, 3);
    DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
    const auto [all_x, all_y] = global_batch(0, 9);
    const auto loss = ddp.backward_parts([&, x = all_x, y = all_y](const BatchPart& part) {
      const int64_t rows = part.index < 3 ? 3 : 0;
      ddp.set_weight(static_cast<double>(rows));
      return torch::mse_loss(ddp(x.narrow(0, 3 * part.index, rows)),
                             y.narrow(0, 3 * part.index, rows));
    });
    const auto gradient = net->weight.grad().clone();
    net->zero_grad();
    const auto whole = torch::mse_loss(net->forward(all_x), all_y);
    whole.backward();
    EXPECT_NEAR(loss.item<double>(), whole.item<double>(), 1e-6);
    EXPECT_TRUE(torch::allclose(gradient, net->weight.grad(), 1e-5, 1e-6));
  });
}

// Running means are those of part 0, each time from those that the step began with.
TEST(SameBits, BuffersAreThoseOfTheFirstPart) {
  auto alone = net_of("cnn");
  const auto [x, y] = global_batch(3, 16);
  alone->forward(x.narrow(0, 0, 4));
  run_ranks(2, [&, x = x, y = y](const Communicator& comm) {
    auto net = net_of("cnn");
    DistributedDataParallel ddp(net, comm, {.virtual_shards = 4});
    ddp.backward_parts(
        block_of_rank(x, comm), block_of_rank(y, comm),
        [&](const auto& rows, const auto& wanted) { return torch::mse_loss(ddp(rows), wanted); });
    if (comm.rank() != 0) return;
    for (size_t i = 0; i < net->buffers().size(); ++i) {
      EXPECT_TRUE(torch::equal(net->buffers()[i], alone->buffers()[i])) << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::test::same_bits_ddp_test
