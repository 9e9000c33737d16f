// Checkpoints beside other features: a run that is interrupted has the bits of one that was not,
// and what a checkpoint cannot hold is refused by name.
#include <gtest/gtest.h>

#include <mutex>
#include <optional>

#include "ranks/rank_threads.hpp"
#include "training.hpp"

namespace lockstep::test::checkpoint_pairs_test {
namespace {

constexpr int64_t kRows = 31;

// Runs `body` on ranks that are threads, each on a device of its own with random numbers of its
// own, and gives what rank 0's returns.
Weights train_on_ranks(int ranks, uint64_t seed,
                       const std::function<Weights(const Communicator&, Device&)>& body) {
  torch::manual_seed(seed);
  std::mutex mutex;
  Weights result;
  run_ranks(ranks, [&](const Communicator& comm) {
    const Devices devices("cpu:1");
    Device& device = devices[0];
    device.run("train", [&] {
      auto weights = body(comm, device);
      const std::lock_guard lock(mutex);
      if (comm.rank() == 0) result = std::move(weights);
    });
  });
  return result;
}

// Ranks that are threads would draw their first weights from one generator, in any order.
void fill_weights(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& each : module.parameters()) {
    each.copy_(torch::sin(torch::arange(each.numel()).view(each.sizes()) * 0.37) * 0.3);
  }
}

torch::Tensor number(double value) {
  return torch::full({}, value, torch::kFloat64);
}

// Two micro-steps in each step; the scaler skips steps, since its first scale is far too large.
template <class Wrapper, class Micro>
void accumulate_two(Wrapper& wrapper, const Rows& rows, DistributedSampler& sampler,
                    const Micro& backward) {
  for (int micro = 0; micro < 2; ++micro) {
    std::optional<NoSync> no_sync;
    if (micro == 0) no_sync.emplace(wrapper);
    const auto [x, y] = rows.at(sampler.next_batch(4));
    backward(x, y);
  }
}

TEST(CheckpointPairs, DdpWithSyncBatchNormScheduleAverageAndScaler) {
  for (const int ranks : {2, 3}) {
    expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
      return train_on_ranks(ranks, seed, [&](const Communicator& comm, Device&) {
        auto net = dropout_net();
        convert_sync_batchnorm(*net, comm);
        DistributedDataParallel ddp(net, comm);
        torch::rand({comm.rank() + 1});  // ranks draw different numbers from here on
        AdamW optimizer(ddp.parameters(), {.lr = 0.01});
        LrScheduler schedule(optimizer, warmup_cosine_lr(3, 12));
        WeightAverage average(*net, {.decay = 0.9, .warmup = true});
        GradScaler scaler({.init_scale = 3e38, .growth_interval = 2});
        DistributedSampler sampler(kRows, comm.size(), comm.rank());
        const Rows rows(kRows);
        Checkpoint checkpoint(folder, comm, {.every = 1, .keep = 2});
        checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("scaler", scaler);
        checkpoint.add("schedule", schedule).add("average", average).add("sampler", sampler);
        for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
          accumulate_two(ddp, rows, sampler, [&](const auto& x, const auto& y) {
            scaler.scale(torch::mse_loss(ddp(x), y)).backward();
          });
          scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
          scaler.update();
          schedule.step();
          average.update();
          EXPECT_TRUE(checkpoint.step(step));
        }
        checkpoint.finish();
        auto weights = weights_of(*net);
        for (const auto& entry : average.entries()) {
          weights.emplace_back("average " + entry.name, entry.average.clone());
        }
        weights.emplace_back("lr", number(schedule.rates().front()));
        weights.emplace_back("scale", number(scaler.get_scale()));
        return weights;
      });
    });
  }
}

TEST(CheckpointPairs, ShardedWithAccumulationScheduleAndScaler) {
  for (int stage = 1; stage <= 3; ++stage) {
    SCOPED_TRACE(testing::Message() << "stage " << stage);
    expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
      return train_on_ranks(3, seed, [&](const Communicator& comm, Device&) {
        auto net = dropout_net();
        FullyShardedDataParallel fsdp(
            net, comm, {.stage = static_cast<ShardStage>(stage), .min_unit_bytes = 0});
        torch::rand({comm.rank() + 1});
        Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
        LrScheduler schedule(optimizer, cosine_lr(12));
        GradScaler scaler({.init_scale = 3e38, .growth_interval = 2});
        DistributedSampler sampler(kRows, comm.size(), comm.rank());
        const Rows rows(kRows);
        Checkpoint checkpoint(folder, comm, {.every = 1, .keep = 2});
        checkpoint.add("model", fsdp).add("optimizer", optimizer, fsdp).add("scaler", scaler);
        checkpoint.add("schedule", schedule).add("sampler", sampler);
        for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
          accumulate_two(fsdp, rows, sampler, [&](const auto& x, const auto& y) {
            scaler.scale(torch::mse_loss(fsdp(x), y)).backward();
          });
          scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
          scaler.update();
          schedule.step();
          EXPECT_TRUE(checkpoint.step(step));
        }
        checkpoint.finish();
        const GatheredParameters gathered(fsdp);
        return weights_of(*net);
      });
    });
  }
}

// Stages whose layers have the names of the whole model.
std::vector<torch::nn::Sequential> three_stages() {
  std::vector<torch::nn::Sequential> stages(3);
  for (size_t i = 0; i < stages.size(); ++i) {
    stages[i] = torch::nn::Sequential();
    stages[i]->push_back("layer" + std::to_string(i),
                         torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    if (i == 1) stages[i]->push_back("dropout", torch::nn::Dropout(0.3));
  }
  return stages;
}

torch::Tensor mse(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::mse_loss(output, target);
}

TEST(CheckpointPairs, APipelineWithATiedWeight) {
  expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
    return train_on_ranks(3, seed, [&](const Communicator& axis, Device& device) {
      const auto stages = three_stages();
      Pipeline pipeline(stages, axis, device, one_f_one_b(3, 4), {.loss = mse});
      const auto own = stages[static_cast<size_t>(axis.rank())]->parameters().front();
      const TiedWeight tied(axis, 0, 2, axis.rank() == 1 ? torch::Tensor() : own);
      AdamW optimizer(pipeline.parameters(), {.lr = 0.01});
      const Rows rows;
      Checkpoint checkpoint(folder, axis, {.every = 1});
      checkpoint.add("model", pipeline).add("optimizer", optimizer, pipeline);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        pipeline.step(rows.x, torch::sin(rows.x));
        tied.sum_gradients();
        optimizer.step({.max_norm = 0.5, .zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      const auto copies = axis.all_gather(own.detach());
      EXPECT_TRUE(torch::equal(copies[0], copies[2]));
      Weights weights;
      for (const auto& copy : copies) weights.emplace_back("", copy.clone());
      return weights;
    });
  });
}

// Slices of slices: a mesh of data and tensor ranks, and every other division of the same model.
TEST(CheckpointPairs, ShardedTensorParallelLayersLoadOnAnotherMesh) {
  const ScratchFolder scratch;
  const auto train = [&](std::vector<MeshAxis> axes, const std::string& folder, int64_t until) {
    int ranks = 1;
    for (const auto& axis : axes) ranks *= axis.size;
    return train_on_ranks(ranks, 1, [&](const Communicator& world, Device&) {
      const Mesh mesh(world, axes);
      torch::nn::Linear up(8, 10), down(10, 4);
      for (auto linear : {up, down}) {
        linear->to(torch::kFloat64);
        fill_weights(*linear);
      }
      torch::nn::Sequential net(ColumnLinear(up, mesh.axis("tp")), torch::nn::Tanh(),
                                RowLinear(down, mesh.axis("tp")));
      FullyShardedDataParallel fsdp(net, mesh.axis("dp"), {.min_unit_bytes = 0});
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
      const Rows rows(24);
      const auto own = static_cast<size_t>(mesh.coordinate("dp"));
      const auto x = rows.x.to(torch::kFloat64).chunk(mesh.axis("dp").size())[own];
      const auto y = rows.y.to(torch::kFloat64).chunk(mesh.axis("dp").size())[own];
      Checkpoint checkpoint(folder, world, {.every = 1});
      checkpoint.add("model", fsdp).add("optimizer", optimizer, fsdp);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        torch::mse_loss(fsdp(x), y).backward();
        optimizer.step({.zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      const torch::NoGradGuard no_grad;
      return Weights{{"output", fsdp(rows.x.to(torch::kFloat64))}};
    });
  };
  const auto mesh_of = [](int dp, int tp) { return std::vector<MeshAxis>{{"dp", dp}, {"tp", tp}}; };
  const auto whole = train(mesh_of(1, 1), scratch.file("whole"), 6).front().second;
  testing::internal::CaptureStderr();  // other numbers of ranks are noted
  int64_t step = 0;
  const std::vector<std::pair<int, int>> meshes = {{2, 2}, {3, 1}, {1, 3}, {1, 1}, {2, 1}, {1, 2}};
  for (const auto& [dp, tp] : meshes) {
    const auto output = train(mesh_of(dp, tp), scratch.file("run"), ++step).front().second;
    if (step < 6) continue;
    EXPECT_TRUE(torch::allclose(output, whole, 1e-9, 1e-9));
  }
  testing::internal::GetCapturedStderr();
}

TEST(CheckpointPairs, ATransformerBlockOfASequenceResumes) {
  expect_exact_resume([&](const std::string& folder, int64_t until, uint64_t seed) {
    return train_on_ranks(2, seed, [&](const Communicator& axis, Device&) {
      TransformerBlock whole(TransformerBlockOptions{
          .width = 8, .heads = 2, .dropout = 0.2, .attention_dropout = 0.1});
      fill_weights(*whole);
      TransformerBlock block(whole, axis, /*sequence_parallel=*/true);
      AdamW optimizer(block->parameters(), {.lr = 0.01});
      const auto x = torch::sin(torch::arange(3 * 4 * 8).reshape({3, 4, 8}) * 0.37);
      const auto own = x.chunk(2, 1)[static_cast<size_t>(axis.rank())];
      Checkpoint checkpoint(folder, axis, {.every = 1});
      checkpoint.add("model", *block).add("optimizer", optimizer, *block);
      for (int64_t step = checkpoint.resume() + 1; step <= until; ++step) {
        block->forward(own).pow(2).sum().backward();
        optimizer.step({.zero_grad = true});
        EXPECT_TRUE(checkpoint.step(step));
      }
      checkpoint.finish();
      return weights_of(*block);
    });
  });
}

TEST(CheckpointPairs, StagesWithTheSameNamesAreRefused) {
  const ScratchFolder scratch;
  const auto expect_refused = [&](Pipeline& pipeline, Checkpoint& checkpoint) {
    checkpoint.add("model", pipeline);
    for (int twice = 0; twice < 2; ++twice) {
      expect_error(Code::kUsage, {"stages 0 and 1", "model: 0.weight", "split_stages()"},
                   [&] { checkpoint.resume(); });
      expect_error(Code::kUsage, {"stages 0 and 1"}, [&] { checkpoint.save(1); });
    }
  };
  const auto stages = [] {
    return std::vector<torch::nn::Sequential>{torch::nn::Sequential(torch::nn::Linear(4, 4)),
                                              torch::nn::Sequential(torch::nn::Linear(4, 4))};
  };
  run_ranks(2, [&](const Communicator& axis) {
    Devices devices("cpu:1");
    Pipeline pipeline(stages(), axis, devices[0], one_f_one_b(2, 2), {.loss = mse});
    Checkpoint checkpoint(scratch.file("ranks"), axis);
    expect_refused(pipeline, checkpoint);
  });
  Pipeline pipeline(stages(), Devices("cpu:2"), one_f_one_b(2, 2), {.loss = mse});
  Checkpoint checkpoint(scratch.file("one"));
  expect_refused(pipeline, checkpoint);
  EXPECT_FALSE(std::filesystem::exists(scratch.file("one")));
}

TEST(CheckpointPairs, TwoModulesOfOneNameAreRefused) {
  const ScratchFolder scratch;
  torch::nn::Linear first(4, 4), second(4, 4);
  Checkpoint checkpoint(scratch.file("run"));
  checkpoint.add("model", *first).add("model", *second);
  expect_error(Code::kUsage, {"two modules", "\"model\"", "weight"}, [&] { checkpoint.save(1); });
}

// As if each rank had built its own part of a model by hand: one of the two would be lost.
TEST(CheckpointPairs, OtherValuesOnAnotherRankAreToldOnce) {
  const ScratchFolder scratch;
  testing::internal::CaptureStderr();
  run_ranks(3, [&](const Communicator& comm) {
    torch::nn::Linear same(4, 4), other(4, 4);
    const torch::NoGradGuard no_grad;
    for (auto& each : same->parameters()) each.fill_(1);
    for (auto& each : other->parameters()) each.fill_(comm.rank() < 2 ? 1 : 2);
    Checkpoint checkpoint(scratch.file("run"), comm);
    checkpoint.add("same", *same).add("other", *other);
    checkpoint.save(1);
    checkpoint.save(2);
    checkpoint.finish();
  });
  const std::string said = testing::internal::GetCapturedStderr();
  const std::string expected = "warning[LS0025]: weight of other has other values on rank 2 than";
  const size_t at = said.find(expected);
  EXPECT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("warning", at + 1), std::string::npos) << said;
}

TEST(CheckpointPairs, AStepInsideAJoinIsRefused) {
  const ScratchFolder scratch;
  run_ranks(2, [&](const Communicator& comm) {
    auto net = dropout_net();
    DistributedDataParallel ddp(net, comm);
    const Rows rows;
    Checkpoint checkpoint(scratch.file("run"), comm, {.every = 1});
    checkpoint.add("model", *net);
    join(ddp, [&] {
      for (int step = 0; step < 2 + comm.rank(); ++step) {
        torch::mse_loss(ddp(rows.x), rows.y).backward();
        expect_error(Code::kUsage, {"join()"}, [&] { static_cast<void>(checkpoint.step(1)); });
        expect_error(Code::kUsage, {"join()"}, [&] { checkpoint.save(1); });
      }
    });
    EXPECT_TRUE(checkpoint.step(1));
    checkpoint.finish();
  });
}

TEST(CheckpointPairs, GatheredParametersAndAveragesInPlaceAreRefused) {
  const ScratchFolder scratch;
  run_ranks(2, [&](const Communicator& comm) {
    auto net = dropout_net();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0});
    Checkpoint checkpoint(scratch.file("sharded"), comm);
    checkpoint.add("model", fsdp);
    checkpoint.save(1);
    {
      const GatheredParameters gathered(fsdp);
      expect_error(Code::kUsage, {"GatheredParameters"}, [&] { checkpoint.save(2); });
      expect_error(Code::kUsage, {"GatheredParameters"}, [&] { checkpoint.resume(); });
    }
    EXPECT_EQ(checkpoint.resume(), 1);
  });
  auto net = dropout_net();
  WeightAverage average(*net);
  average.update();
  Checkpoint checkpoint(scratch.file("averaged"));
  checkpoint.add("model", *net).add("average", average);
  const UseAverage averaged(average);
  expect_error(Code::kUsage, {"UseAverage"}, [&] { checkpoint.save(1); });
}

}  // namespace
}  // namespace lockstep::test::checkpoint_pairs_test
