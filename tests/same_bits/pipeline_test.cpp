#include <gtest/gtest.h>

#include <algorithm>

#include "comm/network/transport_loader.hpp"
#include "same_bits_support.hpp"

// Pipelines with virtual shards: every micro-batch of every data rank is one.

namespace lockstep::test::same_bits_pipeline_test {
namespace {

// How a run trains: two calls of step() for each update, with clipping by the whole model's norm.
struct Recipe {
  std::string schedule = "1f1b";
  int stages = 2;
  bool over_ranks = false;  // a rank for each stage; otherwise a device of the rank
  bool buffers = false;     // of a batch norm, and of a layer that reads its own
  double dropout = 0.2;
  bool weighs = false;  // a loss that leaves out some targets
  bool scaled = false;
  bool low_precision = false;
  bool masters = false;
  bool doubles = false;  // weights that show the last bits of a norm
  std::vector<int> recompute = {};
  int64_t shards = 8;
  int64_t rows = 48;
  int64_t steps = 12;
  std::string folder = {};  // of checkpoints
};

torch::nn::Sequential net_of(const Recipe& recipe) {
  torch::nn::Sequential net(torch::nn::Linear(6, 16));
  if (recipe.buffers) {
    net->push_back(torch::nn::BatchNorm1d(16));
    net->push_back(Drift());
  }
  net->push_back(torch::nn::Tanh());
  if (recipe.dropout > 0) net->push_back(torch::nn::Dropout(recipe.dropout));
  net->push_back(torch::nn::Linear(16, 16));
  net->push_back(torch::nn::Tanh());
  net->push_back(torch::nn::Linear(16, 3));
  fill_in_waves(*net);
  if (recipe.doubles) net->to(torch::kDouble);
  return net;
}

torch::ScalarType dtype_of(const Recipe& recipe) {
  if (recipe.masters) return torch::kBFloat16;
  return recipe.doubles ? torch::kDouble : torch::kFloat;
}

torch::Tensor counted_targets(const torch::Tensor& y) {
  return y.gt(-0.5);
}

PipelineOptions options_of(const Recipe& recipe, const Communicator& data) {
  PipelineOptions options;
  options.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::mse_loss(out.to(y.scalar_type()), y);
  };
  if (recipe.weighs) {
    options.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
      const auto counts = counted_targets(y);
      return ((out - y).square() * counts).sum() / counts.sum();
    };
    options.loss_weight = [](const torch::Tensor& y) {
      return counted_targets(y).sum().item<double>();
    };
  }
  options.recompute = recipe.recompute;
  options.data = data;
  options.virtual_shards = recipe.shards;
  return options;
}

std::unique_ptr<Pipeline> make_pipeline(const Recipe& recipe, const torch::nn::Sequential& net,
                                        const Mesh& mesh, const Devices& devices) {
  const Communicator& data = mesh.axis("dp");
  const auto stages =
      split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), recipe.stages));
  const auto schedule =
      make_schedule(recipe.schedule, recipe.stages, static_cast<int>(recipe.shards / data.size()));
  const auto options = options_of(recipe, data);
  if (!recipe.over_ranks) return std::make_unique<Pipeline>(stages, devices, schedule, options);
  return std::make_unique<Pipeline>(stages, mesh.axis("pp"), devices[0], schedule, options);
}

// Runs a recipe on ranks of which the data ranks have other rows. A rank leaves the parameters and
// buffers of its stages, in the order of their names.
Trained train_recipe(const Recipe& recipe, const Communicator& world) {
  const int stage_ranks = recipe.over_ranks ? recipe.stages : 1;
  const Mesh mesh(world, {{"dp", world.size() / stage_ranks}, {"pp", stage_ranks}});
  const Communicator& data = mesh.axis("dp");
  const Devices devices("cpu:" + std::to_string(recipe.over_ranks ? 1 : recipe.stages));
  auto net = net_of(recipe);
  std::optional<MasterWeights> masters;
  if (recipe.masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kBFloat16});
  const auto pipeline = make_pipeline(recipe, net, mesh, devices);
  Sgd optimizer(pipeline->parameters(), {.lr = 0.05, .momentum = 0.9, .masters = masters});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 5, .enabled = recipe.scaled});
  int64_t first = 0;
  std::optional<Checkpoint> checkpoint;
  if (!recipe.folder.empty()) {
    checkpoint.emplace(recipe.folder, world, CheckpointOptions{.every = 5});
    checkpoint->add("model", *pipeline).add("optimizer", optimizer, *pipeline);
    checkpoint->add("scaler", scaler);
    first = checkpoint->resume();
  }
  Trained trained;
  for (int64_t step = first; step < recipe.steps; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto [x, y] = global_batch(2 * step + micro, recipe.rows);
      const Autocast amp(torch::kCPU, torch::kBFloat16, recipe.low_precision);
      const auto loss =
          pipeline->step(block_of_rank(x, data).to(dtype_of(recipe)),
                         block_of_rank(y, data).to(recipe.doubles ? torch::kDouble : torch::kFloat),
                         {.loss_factor = 0.5, .synchronise = micro == 1, .scaler = &scaler});
      trained.losses.push_back(loss.item<double>());
    }
    scaler.step(optimizer, {.max_norm = 0.3, .zero_grad = true});
    scaler.update();
    if (checkpoint) {
      EXPECT_TRUE(checkpoint->step(step + 1));
    }
  }
  if (checkpoint) checkpoint->finish();
  trained.scale = scaler.get_scale();
  if (masters) masters->restore(*net);
  for (const int stage : pipeline->local_stages()) trained.add(*pipeline->stage(stage));
  std::sort(trained.tensors.begin(), trained.tensors.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return trained;
}

Trained expect_same_on_ranks(const Recipe& recipe, const std::vector<int>& ranks,
                             const std::string& what, const RunRanks& run = run_ranks) {
  const Trained alone = expect_same_on(
      ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); }, what, run);
  const torch::Tensor before = net_of(recipe)->parameters()[0].detach();
  const auto trained = std::find_if(alone.tensors.begin(), alone.tensors.end(),
                                    [](const auto& each) { return each.first == "0.weight"; });
  EXPECT_FALSE(torch::allclose(trained->second, before, 1e-3, 1e-3)) << what << " trains";
  return alone;
}

TEST(SameBitsPipeline, FiftyStepsOnTwoFourAndEightDataRanks) {
  expect_same_on_ranks({.buffers = true, .steps = 50}, {2, 4, 8}, "with buffers");
}

TEST(SameBitsPipeline, EverySchedule) {
  std::optional<Trained> first;
  for (const char* schedule : {"gpipe", "1f1b", "zero-bubble"}) {
    const Recipe recipe{.schedule = schedule, .buffers = true, .scaled = true};
    const Trained alone = expect_same_on_ranks(recipe, {2, 8}, schedule);
    if (!first) first = alone;
    expect_same_run(alone, *first, std::string(schedule) + " and gpipe");
  }
  const Recipe chunks{.schedule = "interleaved", .stages = 4, .buffers = true};
  expect_same_on_ranks(chunks, {2, 4}, "interleaved");
}

TEST(SameBitsPipeline, LowPrecisionRecomputationAndWeights) {
  expect_same_on_ranks({.scaled = true, .low_precision = true}, {2, 4}, "bf16 products");
  expect_same_on_ranks({.dropout = 0, .scaled = true, .masters = true}, {2, 4}, "bf16 weights");
  for (const char* schedule : {"1f1b", "zero-bubble"}) {
    Recipe recipe{.schedule = schedule, .buffers = true};
    const Trained kept = expect_same_on_ranks(recipe, {}, schedule);
    recipe.recompute = {0, 1};
    const std::string what = std::string(schedule) + ", recomputed";
    expect_same_run(expect_same_on_ranks(recipe, {2, 8}, what), kept, what + " and kept");
  }
  expect_same_on_ranks({.weighs = true}, {2, 4}, "loss_weight");
}

TEST(SameBitsPipeline, ThirtyPartsOnTwoThreeAndFiveDataRanks) {
  expect_same_on_ranks({.shards = 30, .rows = 60, .steps = 8}, {2, 3, 5}, "30 parts");
}

TEST(SameBitsPipeline, OverGloo) {
  if (find_module("lockstep-gloo.so").empty()) GTEST_SKIP() << "lockstep-gloo.so was not built";
  expect_same_on_ranks({.buffers = true, .scaled = true}, {2, 4}, "over Gloo", run_gloo_ranks);
}

// The rank of a frozen stage takes part in the norm of the others, whether or not its optimizer was
// given the frozen parameters too.
TEST(SameBitsPipeline, AFrozenStageIsClippedWithTheOthers) {
  const Recipe recipe{.over_ranks = true, .dropout = 0};
  const auto train = [&](const Communicator& axis, bool frozen_too) {
    auto net = net_of(recipe);
    for (auto& each : net[0]->parameters()) each.set_requires_grad(false);
    PipelineOptions options = options_of(recipe, Communicator::self());
    const auto stages =
        split_stages(net, std::vector<int64_t>{1, static_cast<int64_t>(net->size()) - 1});
    const auto schedule = one_f_one_b(2, static_cast<int>(recipe.shards));
    const Devices devices(axis.size() == 1 ? "cpu:2" : "cpu:1");
    auto pipeline = axis.size() == 1
                        ? std::make_unique<Pipeline>(stages, devices, schedule, options)
                        : std::make_unique<Pipeline>(stages, axis, devices[0], schedule, options);
    auto parameters = pipeline->parameters();
    for (const int stage : pipeline->local_stages()) {
      for (const auto& each : pipeline->stage(stage)->parameters()) {
        if (frozen_too && !each.requires_grad()) parameters.push_back(each);
      }
    }
    Sgd optimizer(parameters, {.lr = 0.1});
    const auto [x, y] = global_batch(0, recipe.rows);
    pipeline->step(x, y);
    return optimizer.step({.max_norm = 1e-3}).item<double>();
  };
  for (const bool frozen_too : {false, true}) {
    const double alone = train(Communicator::self(), frozen_too);
    run_ranks(2, [&](const Communicator& axis) { EXPECT_EQ(train(axis, frozen_too), alone); });
  }
}

// Without random numbers, which depend on the stage, cuts and places make no difference either, nor
// does it whether the stages are devices or ranks.
TEST(SameBitsPipeline, CutsAndPlaces) {
  const Recipe two{.buffers = true, .dropout = 0, .scaled = true, .doubles = true};
  torch::manual_seed(7);
  const auto train = [](const Recipe& recipe, int ranks) {
    return train_on(ranks, [&](const Communicator& comm) { return train_recipe(recipe, comm); });
  };
  const Trained expected = train(two, 1);
  Recipe other = two;
  other.stages = 1;
  expect_same_run(train(other, 2), expected, "one stage, two data ranks");
  other.stages = 3;
  other.schedule = "gpipe";
  expect_same_run(train(other, 4), expected, "three stages, four data ranks");
  for (const int ranks : {2, 6}) {  // times a data axis of half as many
    Recipe over_ranks = two;
    over_ranks.over_ranks = true;
    over_ranks.shards = ranks == 6 ? 6 : two.shards;
    Recipe here = over_ranks;
    here.over_ranks = false;
    Trained mine = train(over_ranks, ranks);  // of the first rank: its stage
    Trained wanted = train(here, 1);
    std::erase_if(wanted.tensors, [&](const auto& each) {
      return std::none_of(mine.tensors.begin(), mine.tensors.end(),
                          [&](const auto& own) { return own.first == each.first; });
    });
    mine.round_losses_to_float();
    wanted.round_losses_to_float();
    expect_same_run(mine, wanted, std::to_string(ranks) + " ranks of two stages");
  }
}

TEST(SameBitsPipeline, AfterAResumeWithAnotherNumberOfDataRanks) {
  const Recipe recipe{.buffers = true, .scaled = true, .steps = 20};
  expect_same_after_resume(recipe, 10, {{4, 1}, {1, 2}}, train_recipe, "");
}

// A pipeline of one stage computes what DistributedDataParallel does, and each of many stages too.
TEST(SameBitsPipeline, GradientsAreThoseOfDistributedDataParallel) {
  const Recipe recipe{.stages = 3, .buffers = true, .dropout = 0};
  const auto [x, y] = global_batch(0, recipe.rows);
  auto ddp_net = net_of(recipe);
  DistributedDataParallel ddp(ddp_net, Communicator::self(), {.virtual_shards = recipe.shards});
  const auto expected = ddp.backward_parts(x, y, [&](const auto& rows, const auto& wanted) {
    return torch::mse_loss(ddp(rows), wanted);
  });
  run_ranks(2, [&, x = x, y = y](const Communicator& comm) {
    const Devices devices("cpu:3");
    auto net = net_of(recipe);
    const auto pipeline = make_pipeline(recipe, net, Mesh(comm, {{"dp", 2}, {"pp", 1}}), devices);
    const auto loss = pipeline->step(block_of_rank(x, comm), block_of_rank(y, comm));
    EXPECT_EQ(loss.item<double>(), expected.item<double>());
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(net->parameters()[i].grad(), ddp_net->parameters()[i].grad())) << i;
    }
    EXPECT_TRUE(comm.rank() > 0 || torch::equal(net->buffers()[0], ddp_net->buffers()[0]));
  });
}

// The sum of all rows, on any number of data ranks.
TEST(SameBitsPipeline, SumsAreThoseOfAllRanks) {
  const Recipe recipe{.dropout = 0};
  const auto [x, y] = global_batch(0, recipe.rows);
  auto plain = net_of(recipe);
  const auto sum_of = [](const torch::Tensor& out, const torch::Tensor& target) {
    return torch::mse_loss(out, target, torch::Reduction::Sum);
  };
  const auto whole = sum_of(plain->forward(x), y);
  whole.backward();
  run_ranks(2, [&, x = x, y = y](const Communicator& comm) {
    const Devices devices("cpu:2");
    auto net = net_of(recipe);
    Pipeline pipeline(
        split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), 2)), devices,
        one_f_one_b(2, 4),
        {.loss = sum_of, .reduction = LossReduction::kSum, .data = comm, .virtual_shards = 8});
    expect_close(pipeline.step(block_of_rank(x, comm), block_of_rank(y, comm)), whole.detach(),
                 "loss");
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      expect_close(net->parameters()[i].grad(), plain->parameters()[i].grad(), "gradient");
    }
  });
}

}  // namespace
}  // namespace lockstep::test::same_bits_pipeline_test
