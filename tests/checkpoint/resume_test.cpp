#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "renamed.hpp"
#include "train/checkpoint_parts.hpp"
#include "training.hpp"

namespace lockstep {
namespace {

using test::dropout_net;
using test::expect_exact_resume;
using test::Rows;
using test::Weights;
using test::weights_of;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const torch::nn::Module&, const std::optional<MasterWeights>&)>;

struct Recipe {
  MakeOptimizer optimizer;
  bool amp = false;
  bool masters = false;
  int accumulate = 1;
};

// Batches of 6 of 20 rows: checkpoints fall into the middle of an epoch.
Weights train(const Recipe& recipe, const std::string& folder, int64_t until, uint64_t seed) {
  torch::manual_seed(seed);
  auto net = dropout_net();
  std::optional<MasterWeights> masters;
  if (recipe.masters) masters.emplace(*net, MasterWeightsOptions{torch::kBFloat16});
  const auto optimizer = recipe.optimizer(*net, masters);
  GradScaler scaler({.init_scale = 3e38, .growth_interval = 3, .enabled = recipe.amp});
  torch::optim::StepLR schedule(*optimizer, 2, 0.5);
  const Rows rows;
  DistributedSampler sampler(20, 1, 0);
  double best = 1e9;
  Checkpoint checkpoint(folder, {.every = 1, .keep = 2});
  checkpoint.add("model", *net).add("optimizer", *optimizer, *net).add("scaler", scaler);
  checkpoint.add("schedule", schedule).add("sampler", sampler).add("best", best);
  if (masters) checkpoint.add("masters", *masters, *net);

  for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
    optimizer->zero_grad();
    for (int micro = 0; micro < recipe.accumulate; ++micro) {
      const auto [x, y] = rows.at(sampler.next_batch(6));
      torch::Tensor loss;
      {
        const Autocast amp(torch::kCPU, torch::kBFloat16, recipe.amp || recipe.masters);
        loss = torch::mse_loss(net->forward(x).to(torch::kFloat32), y) / recipe.accumulate;
      }
      scaler.scale(loss).backward();
      best = std::min(best, loss.item<double>());
    }
    scaler.step(*optimizer);
    scaler.update();
    schedule.step();
    EXPECT_TRUE(checkpoint.step(step));
  }
  checkpoint.finish();
  auto weights = weights_of(*net);
  weights.emplace_back("best", torch::full({}, best, torch::kFloat64));
  weights.emplace_back("scale", torch::full({}, scaler.get_scale(), torch::kFloat64));
  if (masters) {
    for (const auto& item : net->named_parameters()) {
      weights.emplace_back("master " + item.key(), masters->of(item.value()).detach().clone());
    }
  }
  return weights;
}

void expect_exact(const Recipe& recipe) {
  expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
    return train(recipe, folder, until, seed);
  });
}

template <class Optimizer, class Options>
MakeOptimizer fused(Options options) {
  return [options](const torch::nn::Module& net, const std::optional<MasterWeights>& masters) {
    auto given = options;
    given.masters = masters;
    return std::make_unique<Optimizer>(net.parameters(), given);
  };
}

template <class Optimizer, class Options>
MakeOptimizer plain(Options options) {
  return [options](const torch::nn::Module& net, const std::optional<MasterWeights>&) {
    return std::make_unique<Optimizer>(net.parameters(), options);
  };
}

TEST(ExactResume, Sgd) {
  expect_exact({fused<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true})});
}
TEST(ExactResume, SgdWithoutMomentum) {
  expect_exact({fused<Sgd>(SgdOptions{.lr = 0.1})});
}
TEST(ExactResume, Adam) {
  expect_exact({fused<Adam>(AdamOptions{.lr = 0.01})});
}
TEST(ExactResume, AdamW) {
  expect_exact({fused<AdamW>(AdamWOptions{.lr = 0.01})});
}
TEST(ExactResume, TorchSgd) {
  expect_exact({plain<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))});
}
TEST(ExactResume, TorchAdam) {
  expect_exact({plain<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true))});
}
TEST(ExactResume, TorchAdamW) {
  expect_exact({plain<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))});
}
TEST(ExactResume, TorchAdagrad) {
  expect_exact({plain<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01))});
}
TEST(ExactResume, TorchRmsprop) {
  expect_exact({plain<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true))});
}
TEST(ExactResume, Accumulation) {
  expect_exact({fused<AdamW>(AdamWOptions{.lr = 0.01}), false, false, 3});
}
TEST(ExactResume, AmpWithSkippedSteps) {
  expect_exact({fused<Adam>(AdamOptions{.lr = 0.01}), true, false, 2});
}
TEST(ExactResume, AmpWithTorchSgd) {
  expect_exact({plain<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)), true});
}
TEST(ExactResume, MasterWeights) {
  expect_exact({fused<AdamW>(AdamWOptions{.lr = 0.01}), false, true});
}
TEST(ExactResume, MasterWeightsAndAmp) {
  expect_exact({fused<Sgd>(SgdOptions{.lr = 0.1, .momentum = 0.9}), true, true, 2});
}

TEST(ExactResume, DataParallelOnTwoDevices) {
  expect_exact_resume([](const std::string& folder, int64_t until, uint64_t seed) {
    torch::manual_seed(seed);
    const Devices devices("cpu:2");
    auto net = dropout_net();
    DataParallel parallel(net, devices);
    Sgd optimizer(net->parameters(), {.lr = 0.1});
    const Rows rows;
    Checkpoint checkpoint(folder, {.every = 1});
    checkpoint.add("model", *net).add("optimizer", optimizer, *net).add(devices);
    for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
      optimizer.zero_grad();
      torch::mse_loss(parallel.forward(rows.x), rows.y).backward();
      optimizer.step();
      EXPECT_TRUE(checkpoint.step(step));
    }
    checkpoint.finish();
    return weights_of(*net);
  });
}

TEST(ExactResume, PipelineInOneProcess) {
  expect_exact_resume([](const std::string& folder, int64_t until, uint64_t seed) {
    torch::manual_seed(seed);
    const Devices devices("cpu:2");
    auto net = dropout_net();
    Pipeline pipeline(
        split_stages(net, std::vector<int64_t>{3, 2}), devices, one_f_one_b(2, 4),
        {.loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); }});
    AdamW optimizer(pipeline.parameters(), {.lr = 0.01});
    const Rows rows;
    Checkpoint checkpoint(folder, {.every = 1});
    checkpoint.add("model", pipeline).add("optimizer", optimizer, pipeline);
    for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
      pipeline.step(rows.x, rows.y);
      optimizer.step(StepExtras{.zero_grad = true});
      EXPECT_TRUE(checkpoint.step(step));
    }
    checkpoint.finish();
    return weights_of(*net);
  });
}

// A loop that runs on a device's worker draws from the worker's generator.
TEST(ExactResume, ALoopOnAWorker) {
  expect_exact_resume([](const std::string& folder, int64_t until, uint64_t seed) {
    torch::manual_seed(seed);
    const Devices devices("cpu:1");
    return devices[0].run("train", [&] {
      auto net = dropout_net();
      Sgd optimizer(net->parameters(), {.lr = 0.1});
      const Rows rows;
      Checkpoint checkpoint(folder, {.every = 1});
      checkpoint.add("model", *net).add("optimizer", optimizer, *net);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        torch::mse_loss(net->forward(rows.x), rows.y).backward();
        optimizer.step(StepExtras{.zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      return weights_of(*net);
    });
  });
}

TEST(Checkpoint, SavesTheProgramsOwnValues) {
  const test::ScratchFolder scratch;
  int64_t count = 3;
  double ratio = std::numeric_limits<double>::infinity();
  std::string name = "größe \"1\"";
  const nlohmann::json all = {
      {"a", {1, 2.5, nullptr}}, {"best", -std::numeric_limits<double>::infinity()}, {"b", "inf"}};
  nlohmann::json more = all;
  torch::Tensor average = torch::arange(5);
  torch::Tensor none;
  std::map<std::string, int> own = {{"x", 1}};
  const auto add_all = [&](Checkpoint& checkpoint) {
    checkpoint.add("count", count).add("ratio", ratio).add("name", name).add("more", more);
    checkpoint.add("average", average).add("none", none);
    checkpoint.add(
        "own", [&] { return nlohmann::json(own); },
        [&](const nlohmann::json& saved) { saved.get_to(own); });
  };
  {
    Checkpoint checkpoint(scratch.file("a"));
    add_all(checkpoint);
    EXPECT_EQ(checkpoint.resume(), 0);
    checkpoint.save(7);
    checkpoint.finish();
  }
  count = 0;
  ratio = 0;
  name.clear();
  more = 5;
  average = torch::Tensor();
  own.clear();
  Checkpoint checkpoint(scratch.file("a"));
  add_all(checkpoint);
  EXPECT_EQ(checkpoint.resume(), 7);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(ratio, std::numeric_limits<double>::infinity());
  EXPECT_EQ(name, "größe \"1\"");
  EXPECT_EQ(more, all);
  EXPECT_TRUE(torch::equal(average, torch::arange(5)));
  EXPECT_FALSE(none.defined());
  EXPECT_EQ(own, (std::map<std::string, int>{{"x", 1}}));
}

// Whoever calls save() after the last step need not know whether step() has saved it.
TEST(Checkpoint, AStepThatIsSavedAlreadyNeedsNoSecondSave) {
  const test::ScratchFolder scratch;
  torch::nn::Linear net(2, 2);
  {
    Checkpoint checkpoint(scratch.file("a"), {.every = 2});
    checkpoint.add("model", *net);
    for (int64_t step = 1; step <= 4; ++step) EXPECT_TRUE(checkpoint.step(step));
    checkpoint.save(4);
    checkpoint.finish();
  }
  Checkpoint checkpoint(scratch.file("a"));
  checkpoint.add("model", *net);
  EXPECT_EQ(checkpoint.resume(), 4);
  checkpoint.save(4);
  checkpoint.finish();
  EXPECT_EQ(test::list_steps(scratch.file("a")), (std::vector<int64_t>{2, 4}));
}

// Momentum that was made since the save is forgotten.
TEST(Checkpoint, ARunThatGoesBackHasTheOptimizersStateOfThen) {
  for (const bool of_torch : {false, true}) {
    const test::ScratchFolder scratch;
    torch::manual_seed(1);
    torch::nn::Linear net(4, 4);
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (of_torch) {
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
    } else {
      optimizer = std::make_unique<Sgd>(net->parameters(), SgdOptions{.lr = 0.1, .momentum = 0.9});
    }
    Checkpoint checkpoint(scratch.file("a"));
    checkpoint.add("model", *net).add("optimizer", *optimizer, *net);
    checkpoint.save(0);
    checkpoint.finish();
    const auto update = [&] {
      optimizer->zero_grad();
      net->forward(torch::ones({2, 4})).square().mean().backward();
      optimizer->step();
    };
    update();
    const auto first = weights_of(*net);
    update();
    EXPECT_EQ(checkpoint.resume(), 0);
    update();
    test::expect_same_bits(weights_of(*net), first);
  }
}

// An evaluation, another number of devices, and no pipeline: what does not fit starts anew.
TEST(Checkpoint, RandomNumbersOfOtherDevicesAreLeftOut) {
  const test::ScratchFolder scratch;
  torch::manual_seed(3);
  {
    const Devices devices("cpu:2");
    auto net = dropout_net();
    DataParallel parallel(net, devices);
    Checkpoint checkpoint(scratch.file("devices"));
    checkpoint.add("model", *net).add(devices).save(5);
    Checkpoint staged(scratch.file("pipeline"));
    auto other = dropout_net();
    Pipeline pipeline(
        split_stages(other, std::vector<int64_t>{3, 2}), devices, one_f_one_b(2, 4),
        {.loss = [](const auto& out, const auto& y) { return torch::mse_loss(out, y); }});
    staged.add("model", pipeline).save(6);
  }
  const auto expect_told = [&](const std::string& folder, int64_t step, const std::string& counts,
                               const std::optional<Devices>& devices) {
    auto net = dropout_net();
    Checkpoint checkpoint(scratch.file(folder));
    checkpoint.add("model", *net);
    if (devices) checkpoint.add(*devices);
    testing::internal::CaptureStderr();
    EXPECT_EQ(checkpoint.resume(), step);
    const std::string errors = testing::internal::GetCapturedStderr();
    EXPECT_NE(errors.find("has random numbers of " + counts + ": they start anew"),
              std::string::npos)
        << errors;
  };
  expect_told("devices", 5, "2 devices, and this run has 0", std::nullopt);
  expect_told("devices", 5, "2 devices, and this run has 1", Devices("cpu:1"));
  expect_told("pipeline", 6, "1 pipelines, and this run has 0", std::nullopt);
}

TEST(Checkpoint, GeneratorsOfGpusGoByTheirPlace) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(gpu_generators({"rank2.cpu"}), Names{});
  EXPECT_EQ(gpu_generators({"rank2.cpu", "rank2.cuda:0", "rank2.cuda:1"}),
            (Names{"rank2.cuda:0", "rank2.cuda:1"}));
  EXPECT_EQ(gpu_generators({"rank1.cpu", "rank1.cuda:1"}), Names{"rank1.cuda:1"})
      << "an earlier version's: the rank's only GPU";
  EXPECT_EQ(gpu_generators({"rank0.cuda:10", "rank0.cuda:2", "rank0.cuda:3"}),
            (Names{"rank0.cuda:2", "rank0.cuda:3", "rank0.cuda:10"}));
}

TEST(Checkpoint, RandomNumbersOfMissingGpusAreLeftOut) {
  const test::ScratchFolder scratch;
  {
    auto net = dropout_net();
    Checkpoint(scratch.file("cpu")).add("model", *net).save(5);
  }
  test::copy_renamed(scratch.file("cpu"), scratch.file("gpu"), [](const std::string& name) {
    return name == "rank0.cpu" ? "rank0.cuda:0" : name;
  });
  auto net = dropout_net();
  Checkpoint checkpoint(scratch.file("gpu"));
  checkpoint.add("model", *net);
  testing::internal::CaptureStderr();
  EXPECT_EQ(checkpoint.resume(), 5);
  const std::string errors = testing::internal::GetCapturedStderr();
  EXPECT_NE(errors.find("has random numbers of 1 GPUs, and this run has 0: they start anew"),
            std::string::npos)
      << errors;
}

// What is written is what was there when save() was called, whatever the step does next.
TEST(Checkpoint, TheCopyIsMadeInTheStep) {
  const test::ScratchFolder scratch;
  torch::nn::Linear net(256, 256);
  const auto before = weights_of(*net);
  {
    Checkpoint checkpoint(scratch.file("a"));
    checkpoint.add("model", *net);
    checkpoint.save(1);
    const torch::NoGradGuard no_grad;
    net->weight.fill_(3);
    net->bias.fill_(4);
    checkpoint.finish();
  }
  Checkpoint checkpoint(scratch.file("a"));
  checkpoint.add("model", *net);
  EXPECT_EQ(checkpoint.resume(), 1);
  test::expect_same_bits(weights_of(*net), before);
}

TEST(Checkpoint, KeepsAsManyAsAskedFor) {
  const test::ScratchFolder scratch;
  torch::nn::Linear net(2, 2);
  Checkpoint checkpoint(scratch.file("a"), {.every = 3, .keep = 2});
  checkpoint.add("model", *net);
  for (int64_t step = 1; step <= 13; ++step) EXPECT_TRUE(checkpoint.step(step));
  checkpoint.finish();
  EXPECT_EQ(test::list_steps(scratch.file("a")), (std::vector<int64_t>{9, 12}));
}

TEST(Checkpoint, ASignalSavesAndStops) {
  for (const auto& [signal, late] : {std::pair{SIGTERM, SIGUSR1}, std::pair{SIGUSR1, SIGTERM}}) {
    {
      const test::ScratchFolder scratch;
      torch::nn::Linear net(2, 2);
      Checkpoint checkpoint(scratch.file("a"), {.every = 100});
      checkpoint.add("model", *net);
      EXPECT_TRUE(checkpoint.step(1));
      std::raise(signal);
      std::raise(
          signal);  // as SLURM and the launcher send it, one after the other: the same request
      EXPECT_FALSE(checkpoint.step(2));
      EXPECT_EQ(test::list_steps(scratch.file("a")), (std::vector<int64_t>{2}));
    }
    std::raise(
        late);  // a first signal, to a rank that has stopped with the others and is about to end
  }
}

TEST(Sampler, NextGoesThroughTheEpochs) {
  DistributedSampler sampler(7, 2, 1);
  const auto first = sampler.indices();
  auto rows = sampler.next_batch(3);
  const auto rest = sampler.next_batch(3);
  rows.insert(rows.end(), rest.begin(), rest.end());
  EXPECT_EQ(rows, first);
  EXPECT_EQ(rest.size(), 1U);
  const auto second = sampler.next_batch(4);
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(second, sampler.indices());
  sampler.seek(0, 3);
  EXPECT_EQ(sampler.next_batch(9), rest);
  test::expect_error(Code::kSplit, {"position 5"}, [&] { sampler.seek(0, 5); });
  test::expect_error(Code::kSplit, {"0 rows"}, [&] { sampler.next_batch(0); });
}

}  // namespace
}  // namespace lockstep
