// What a training loop does around the step: accumulation, scaling, clipping, uneven batches,
// frozen and unused parameters, buffers, evaluation.
#include <gtest/gtest.h>

#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/weight_average.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::steps_test {
namespace {

constexpr int64_t kRows = 30;

// Trains alone on all rows, in micro-batches of which all ranks have a part.
torch::Tensor alone(int micro_steps, int steps, double max_norm = 0) {
  auto net = three_layers();
  Sgd optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < micro_steps; ++micro) {
      const auto x = wave({kRows, 6}, step + 0.3 * micro);
      (torch::mse_loss(net->forward(x), wave({kRows, 3}, 1)) / micro_steps).backward();
    }
    if (max_norm > 0) {
      optimizer.step(StepExtras{.max_norm = max_norm});
    } else {
      optimizer.step();
    }
    optimizer.zero_grad();
  }
  return weights_of(*net);
}

enum class Accumulate { kNoSync, kAveraged, kMixed };

class ShardedSteps : public testing::TestWithParam<std::tuple<ShardStage, int>> {
 protected:
  ShardStage stage() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  // Stage 3 gathers on 2 ranks, and on 3 has one copy for all.
  ShardOptions options() const {
    return {.stage = stage(), .min_unit_bytes = 0, .share_on_host = ranks() != 2};
  }
};
INSTANTIATE_TEST_SUITE_P(Stages, ShardedSteps,
                         testing::Combine(testing::ValuesIn(kStages), testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return "Stage" +
                                  std::to_string(static_cast<int>(std::get<0>(test.param))) + "On" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(ShardedSteps, AccumulateInEveryWay) {
  const auto wanted = alone(3, 3);
  for (const auto way : {Accumulate::kNoSync, Accumulate::kAveraged, Accumulate::kMixed}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < 3; ++micro) {
          std::optional<NoSync> no_sync;
          if (way == Accumulate::kNoSync && micro < 2) no_sync.emplace(fsdp);
          if (way == Accumulate::kMixed && micro == 1) no_sync.emplace(fsdp);
          const auto x = own_rows(wave({kRows, 6}, step + 0.3 * micro), comm);
          (torch::mse_loss(fsdp(x), own_rows(wave({kRows, 3}, 1), comm)) / 3).backward();
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      expect_near_all(whole_weights(fsdp), wanted, "accumulated weights");
    });
  }
}

TEST_P(ShardedSteps, ClipByTheWholeNorm) {
  const auto wanted = alone(1, 3, 0.05);
  for (const bool free_function : {false, true}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
      for (int step = 0; step < 3; ++step) {
        const auto x = own_rows(wave({kRows, 6}, step), comm);
        torch::mse_loss(fsdp(x), own_rows(wave({kRows, 3}, 1), comm)).backward();
        torch::Tensor norm;
        if (free_function) {
          norm = clip_grad_norm_(fsdp.parameters(), 0.05);
          optimizer.step();
        } else {
          norm = optimizer.step(StepExtras{.max_norm = 0.05});
        }
        EXPECT_GT(norm.item<double>(), 0.05);
        expect_same_on_all(comm, norm.view({1}), "norm");
        optimizer.zero_grad();
      }
      expect_near_all(whole_weights(fsdp), wanted, "clipped weights");
    });
  }
}

// Rank r has r + 1 rows: weighted by them, the mean is that of all rows.
TEST_P(ShardedSteps, UnevenBatches) {
  const int64_t all = int64_t{ranks()} * (ranks() + 1) / 2;
  const auto x = wave({all, 6}, 0);
  const auto y = wave({all, 3}, 1);
  auto one = three_layers();
  torch::mse_loss(one->forward(x), y).backward();
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    const int64_t rows = comm.rank() + 1;
    const int64_t first = int64_t{comm.rank()} * (comm.rank() + 1) / 2;
    fsdp.set_weight(static_cast<double>(rows));
    torch::mse_loss(fsdp(x.narrow(0, first, rows)), y.narrow(0, first, rows)).backward();
    Sgd optimizer(fsdp.parameters(), {.lr = 1});
    optimizer.step();
    auto reference = three_layers();
    for (size_t i = 0; i < reference->parameters().size(); ++i) {
      reference->parameters()[i].mutable_grad() = one->parameters()[i].grad().clone();
    }
    Sgd(reference->parameters(), {.lr = 1}).step();
    expect_near_all(whole_weights(fsdp), weights_of(*reference), "weights");
  });
}

// One rank overflows: all skip, and the scale shrinks everywhere.
TEST_P(ShardedSteps, OverflowOnOneRankSkipsAll) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    AdamW optimizer(fsdp.parameters(), {.lr = 0.01});
    GradScaler scaler({.init_scale = 1024});
    const auto before = whole_weights(fsdp);
    const auto x = own_rows(wave({kRows, 6}, 0), comm).clone();
    for (int step = 0; step < 2; ++step) {
      auto input = x.clone();
      if (step == 0 && comm.rank() == comm.size() - 1) input[0][0] = INFINITY;
      scaler.scale(fsdp(input).pow(2).mean()).backward();
      scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
      scaler.update();
      const bool changed = !torch::equal(before, whole_weights(fsdp));
      EXPECT_EQ(changed, step == 1);
      EXPECT_EQ(scaler.get_scale(), 512);
    }
    EXPECT_EQ(scaler.skipped_steps().size(), 1U);
  });
}

// Gradients that only overflow in the part that one rank has must stop the others too.
TEST_P(ShardedSteps, OverflowOfOneShardSkipsAll) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.01});
    GradScaler scaler({.init_scale = 2});
    scaler.scale(fsdp(own_rows(wave({kRows, 6}, 0), comm)).pow(2).mean()).backward();
    const auto before = whole_weights(fsdp);
    if (comm.rank() == 0) {
      for (const auto& shard : fsdp.parameters()) {
        if (shard.grad().defined()) shard.grad()[0] = NAN;
      }
    }
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(torch::equal(before, whole_weights(fsdp)));
    EXPECT_EQ(scaler.get_scale(), 1);
  });
}

TEST_P(ShardedSteps, FrozenParametersStay) {
  auto one = three_layers();
  one->parameters()[2].set_requires_grad(false);
  Sgd alone_optimizer(one->parameters(), {.lr = 0.1});
  const auto x = wave({kRows, 6}, 0);
  const auto y = wave({kRows, 3}, 1);
  for (int step = 0; step < 2; ++step) {
    alone_optimizer.zero_grad();
    torch::mse_loss(one->forward(x), y).backward();
    alone_optimizer.step();
  }
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    net->parameters()[2].set_requires_grad(false);
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      torch::mse_loss(fsdp(own_rows(x, comm)), own_rows(y, comm)).backward();
      optimizer.step();
    }
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(6, 5));
    left = register_module("left", torch::nn::Linear(5, 2));
    right = register_module("right", torch::nn::Linear(5, 2));
    to(torch::kDouble);
    fill_weights(*this);
  }
  torch::Tensor forward(const torch::Tensor& x, bool use_right) {
    auto h = trunk(x);
    auto out = left(h);
    return use_right ? out + right(h) : out;
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(TwoHeads);

TEST_P(ShardedSteps, UnusedParametersAreNamed) {
  const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
    TwoHeads net;
    FullyShardedDataParallel fsdp(net, comm, options());
    fsdp(wave({2, 6}, 0), false).sum().backward();
  });
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.failed());
    EXPECT_NE(outcome.text().find("right.weight"), std::string::npos) << outcome.text();
  }
}

TEST_P(ShardedSteps, UnusedParametersKeepTheirWeights) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    TwoHeads net;
    ShardOptions chosen = options();
    chosen.find_unused_parameters = true;
    FullyShardedDataParallel fsdp(net, comm, chosen);
    AdamW optimizer(fsdp.parameters(), {.lr = 0.1, .weight_decay = 0.5});
    fsdp(wave({2, 6}, 0), false).sum().backward();
    for (const auto& [name, shard] : fsdp.named_parameters()) {
      if (shard.numel() == 0) continue;
      EXPECT_EQ(shard.grad().defined(), !name.starts_with("right")) << name;
    }
    optimizer.step();
    optimizer.zero_grad();
    const auto weights = whole_weights(fsdp);
    TwoHeads fresh;
    const auto count = fresh->right->weight.numel() + fresh->right->bias.numel();
    EXPECT_TRUE(torch::equal(weights.narrow(0, weights.numel() - count, count),
                             weights_of(*fresh).narrow(0, weights.numel() - count, count)));
    fsdp(wave({2, 6}, 0), true).sum().backward();
    optimizer.step();
    EXPECT_FALSE(torch::equal(weights, whole_weights(fsdp)));
  });
}

// Buffers of rank 0 go to all before each averaged forward, as in DistributedDataParallel.
// An evaluation does not count, even if gradients are enabled in it.
TEST_P(ShardedSteps, BatchNormFollowsRankZero) {
  for (const bool evaluates : {false, true}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                                torch::nn::Linear(8, 3));
      net->to(torch::kDouble);
      fill_weights(*net);
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
      const auto evaluate = [&] {
        if (!evaluates) return;
        net->eval();
        fsdp(wave({4, 6}, 0));
        net->train();
      };
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        evaluate();
        fsdp(own_rows(wave({kRows, 6}, step), comm)).pow(2).mean().backward();
        optimizer.step();
      }
      evaluate();
      fsdp(own_rows(wave({kRows, 6}, 9), comm) * 0);  // the same rows: sends buffers first
      expect_same_on_all(comm, net->named_buffers()["1.running_var"], "running_var");
      expect_same_on_all(comm, whole_weights(fsdp), "weights");
    });
  }
}

// Evaluation through the wrapper, and through the module on every rank, use the weights of now.
TEST_P(ShardedSteps, EvaluateAfterAStep) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    const auto x = wave({4, 6}, 0);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      fsdp(own_rows(wave({kRows, 6}, step), comm)).pow(2).mean().backward();
      optimizer.step();
      const torch::NoGradGuard no_grad;
      const auto through_wrapper = fsdp(x);
      const auto through_module = net->forward(x);
      torch::Tensor alone;
      {
        const GatheredParameters gathered(fsdp);
        if (comm.rank() == 0) alone = net->forward(x);  // no other rank takes part
      }
      EXPECT_TRUE(torch::equal(through_wrapper, through_module));
      if (comm.rank() == 0) {
        EXPECT_TRUE(torch::equal(through_wrapper, alone));
      }
      expect_same_on_all(comm, through_wrapper, "output");
    }
  });
}

// Weights that change inside GatheredParameters reach the shards and their master weights, also if
// torch::load gives the parameters other memory.
TEST_P(ShardedSteps, MasterWeightsFollowChangedWeights) {
  const ScratchFolder folder;
  torch::nn::Sequential twos(torch::nn::Linear(6, 20), torch::nn::Linear(20, 3));
  for (auto& each : twos->parameters()) torch::nn::init::constant_(each, 2);
  twos->to(torch::kBFloat16);
  torch::save(twos, folder.file("twos.pt"));
  for (const bool loads : {false, true}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      torch::nn::Sequential net(torch::nn::Linear(6, 20), torch::nn::Linear(20, 3));
      fill_weights(*net);
      MasterWeights masters(*net);
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0, .masters = masters});
      {
        const GatheredParameters gathered(fsdp);
        const torch::NoGradGuard no_grad;
        if (loads) {
          torch::load(net, folder.file("twos.pt"));
        } else {
          for (auto& each : net->parameters()) each.fill_(2);
        }
        expect_error(Code::kUsage, {"restore()", "Checkpoint::add"},
                     [&] { masters.restore(*net); });
      }
      fsdp(torch::ones({2, 6}, torch::kBFloat16)).sum().backward();
      optimizer.step();  // rounds the masters to the weights
      EXPECT_TRUE(whole_weights(fsdp).eq(2).all().item<bool>());
    });
  }
}

torch::nn::Sequential doubled_layers() {
  auto net = three_layers();
  const torch::NoGradGuard no_grad;
  for (auto& each : net->parameters()) each.mul_(2);
  return net;
}

// torch::load gives the parameters other memory, whose values the shards take over.
TEST_P(ShardedSteps, TorchSaveAndLoadInsideGatheredParameters) {
  const ScratchFolder folder;
  auto one = doubled_layers();
  torch::save(one, folder.file("one.pt"));
  one->forward(wave({kRows, 6}, 0)).pow(2).mean().backward();
  Sgd(one->parameters(), {.lr = 0.1}).step();
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    {
      const GatheredParameters gathered(fsdp);
      torch::load(net, folder.file("one.pt"));
    }
    EXPECT_TRUE(torch::equal(whole_weights(fsdp), weights_of(*doubled_layers())));
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
    fsdp(own_rows(wave({kRows, 6}, 0), comm)).pow(2).mean().backward();
    optimizer.step();
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
    const auto file = folder.file("rank" + std::to_string(comm.rank()));
    {
      const GatheredParameters gathered(fsdp);
      torch::save(net, file);
    }
    auto loaded = three_layers();
    torch::load(loaded, file);
    EXPECT_TRUE(torch::equal(weights_of(*loaded), whole_weights(fsdp)));
  });
}

// Outside, no update would reach the loaded weights, and no gather would see them.
TEST_P(ShardedSteps, OtherMemoryIsRefused) {
  const ScratchFolder folder;
  torch::save(doubled_layers(), folder.file("one.pt"));
  enum class Then { kForward, kGather, kResized };
  for (const auto then : {Then::kForward, Then::kGather, Then::kResized}) {
    const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      if (then == Then::kResized) {
        const GatheredParameters gathered(fsdp);
        net->parameters()[0].set_data(torch::ones({3}, torch::kDouble));
      } else {
        torch::load(net, folder.file("one.pt"));
      }
      if (then == Then::kGather) {
        whole_weights(fsdp);
      } else {
        fsdp(wave({2, 6}, 0));
      }
    });
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find("parameter 0.weight"), std::string::npos) << outcome.text();
      const char* what =
          then == Then::kResized ? "was moved, converted or resized inside" : "torch::load";
      EXPECT_NE(outcome.text().find(what), std::string::npos) << outcome.text();
    }
  }
}

// What the guard writes back when it ends would overwrite the update of shards that are no part of
// the whole parameters.
TEST_P(ShardedSteps, AnUpdateInsideGatheredParametersIsKeptOrRefused) {
  auto one = three_layers();
  const auto x = wave({kRows, 6}, 0);
  one->forward(x).pow(2).mean().backward();
  Sgd(one->parameters(), {.lr = 0.1}).step();
  const bool kept = ranks() == 1 || (ranks() == 2 && stage() != ShardStage::kParameters);
  for (const bool fused : {true, false}) {
    const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
      torch::optim::SGD of_torch(fsdp.parameters(), 0.1);
      fsdp(own_rows(x, comm)).pow(2).mean().backward();
      {
        const GatheredParameters gathered(fsdp);
        fused ? optimizer.step() : of_torch.step();
      }
      expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
    });
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(outcome.failed(), !kept) << outcome.text();
      if (kept) continue;
      EXPECT_NE(outcome.text().find("an optimizer changed shards inside GatheredParameters"),
                std::string::npos)
          << outcome.text();
    }
  }
}

TEST_P(ShardedSteps, BackwardAndAveragesInsideGatheredParametersAreRefused) {
  for (const bool averages : {false, true}) {
    const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      WeightAverage average(fsdp);
      const GatheredParameters gathered(fsdp);
      if (averages) {
        const UseAverage in_place(average);
      } else {
        fsdp(own_rows(wave({kRows, 6}, 0), comm)).pow(2).mean().backward();
      }
    });
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find(averages ? "a change of the shards inside GatheredParameters"
                                             : "backward inside GatheredParameters"),
                std::string::npos)
          << outcome.text();
    }
  }
}

// The module's own parameters never have gradients: an optimizer of them would do nothing.
TEST_P(ShardedSteps, OptimizersOfTheModulesParametersAreRefused) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    Sgd early(net->parameters(), {.lr = 0.1});
    FullyShardedDataParallel fsdp(net, comm, options());
    fsdp(own_rows(wave({kRows, 6}, 0), comm)).pow(2).mean().backward();
    const auto refused = [](const std::string& by, const std::function<void()>& call) {
      expect_error(Code::kUsage, {by, "sharded by FullyShardedDataParallel", "fsdp.parameters()"},
                   call);
    };
    refused("parameter 0 of group 0", [&] { early.step(); });
    refused("lockstep::AdamW", [&] { AdamW(net->parameters()); });
    refused("clip_grad_norm_", [&] { clip_grad_norm_(net->parameters(), 1); });
    torch::optim::SGD of_torch(net->parameters(), 0.1);
    GradScaler scaler;
    scaler.scale(torch::ones({}));
    refused("GradScaler: parameter 0 of group 0", [&] { scaler.unscale_(of_torch); });
  });
}

TEST_P(ShardedSteps, SaveAndLoadWeights) {
  const ScratchFolder folder;
  auto one = three_layers();
  save_weights(*one, folder.file("one.safetensors"));
  run_ranks(ranks(), [&](const Communicator& comm) {
    torch::manual_seed(comm.rank());
    torch::nn::Sequential net(torch::nn::Linear(6, 20), torch::nn::Tanh(),
                              torch::nn::Linear(20, 20), torch::nn::Tanh(),
                              torch::nn::Linear(20, 3));
    net->to(torch::kDouble);
    FullyShardedDataParallel fsdp(net, comm, options());
    if (comm.size() > 1) {
      expect_error(Code::kUsage, {"0.weight", "GatheredParameters"},
                   [&] { save_weights(*net, folder.file("bad")); });
    }
    {
      const GatheredParameters gathered(fsdp);
      load_weights(*net, folder.file("one.safetensors"));
    }
    EXPECT_TRUE(torch::equal(whole_weights(fsdp), weights_of(*three_layers())));
    save_weights(fsdp, folder.file("two.safetensors"));
    comm.barrier();
    EXPECT_EQ(read_bytes(folder.file("one.safetensors")),
              read_bytes(folder.file("two.safetensors")));
  });
}

// Dropping the gradients of a window ends it, whichever way they are dropped.
TEST_P(ShardedSteps, DroppedWindow) {
  for (const bool to_none : {true, false}) {
    run_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 1});
      const auto x = own_rows(wave({kRows, 6}, 0), comm);
      {
        const NoSync no_sync(fsdp);
        fsdp(x + 3).pow(2).mean().backward();
      }
      optimizer.zero_grad(to_none);
      fsdp(x).pow(2).mean().backward();
      optimizer.step();
      auto one = three_layers();
      one->forward(wave({kRows, 6}, 0)).pow(2).mean().backward();
      Sgd(one->parameters(), {.lr = 1}).step();
      expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
    });
  }
}

// Nor does it matter that a forward without a backward came between.
TEST_P(ShardedSteps, DroppedWindowAfterAForward) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 1});
    const auto x = own_rows(wave({kRows, 6}, 0), comm);
    {
      const NoSync no_sync(fsdp);
      fsdp(x + 3).pow(2).mean().backward();
      fsdp(x + 4);
    }
    optimizer.zero_grad();
    fsdp(x).pow(2).mean().backward();
    optimizer.step();
    auto one = three_layers();
    one->forward(wave({kRows, 6}, 0)).pow(2).mean().backward();
    Sgd(one->parameters(), {.lr = 1}).step();
    expect_near_all(whole_weights(fsdp), weights_of(*one), "weights");
  });
}

// A gradient that is kept while the next backward writes another keeps its values.
TEST_P(ShardedSteps, KeptGradients) {
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    const auto x = own_rows(wave({kRows, 6}, 0), comm);
    fsdp(x).pow(2).mean().backward();
    std::vector<torch::Tensor> kept, values;
    for (const auto& shard : fsdp.parameters()) {
      if (!shard.grad().defined()) continue;
      kept.push_back(shard.grad());
      values.push_back(shard.grad().clone());
    }
    fsdp.zero_grad();
    fsdp(x + 5).pow(2).mean().backward();
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(torch::equal(kept[i], values[i]));
  });
}

TEST_P(ShardedSteps, UpdateInsideAWindowIsRefused) {
  const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 1});
    const auto x = own_rows(wave({kRows, 6}, 0), comm);
    {
      const NoSync no_sync(fsdp);
      fsdp(x).pow(2).mean().backward();
    }
    optimizer.step();
    fsdp(x);
  });
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.failed());
    EXPECT_NE(outcome.text().find("not averaged"), std::string::npos) << outcome.text();
  }
}

// Gradients of a backward that ended with an error would be lost, or added to the next ones.
TEST_P(ShardedSteps, AStepAfterAHalfBackwardIsRefused) {
  for (const bool accumulates : {false, true}) {
    const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
      auto net = three_layers();
      FullyShardedDataParallel fsdp(net, comm, options());
      Sgd optimizer(fsdp.parameters(), {.lr = 1});
      const auto x = own_rows(wave({kRows, 6}, 0), comm);
      {
        std::optional<NoSync> no_sync;
        if (accumulates) no_sync.emplace(fsdp);
        const auto input = x.clone().set_requires_grad(true);
        input.register_hook([](const torch::Tensor&) -> torch::Tensor {
          throw std::runtime_error("the loss fell over");
        });
        EXPECT_THROW(fsdp(input).pow(2).mean().backward(), std::exception);
      }
      optimizer.zero_grad();
      fsdp(x).pow(2).mean().backward();
      optimizer.step();
    });
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find("the last backward did not end"), std::string::npos)
          << outcome.text();
    }
  }
}

// An error in the loss itself comes before any gradient: training goes on.
TEST_P(ShardedSteps, ABackwardThatReachedNoParameterIsForgotten) {
  const auto wanted = alone(1, 2);
  run_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
    const auto y = own_rows(wave({kRows, 3}, 1), comm);
    for (int step = 0; step < 2; ++step) {
      const auto x = own_rows(wave({kRows, 6}, step), comm);
      const auto output = fsdp(x);
      output.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("the loss fell over");
      });
      EXPECT_THROW(torch::mse_loss(output, y).backward(), std::exception);
      torch::mse_loss(fsdp(x), y).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    expect_near_all(whole_weights(fsdp), wanted, "weights");
  });
}

// Autograd refuses a graph that was recorded with other weights.
TEST_P(ShardedSteps, OldGraphIsRefused) {
  const auto outcomes = outcomes_of_ranks(ranks(), [&](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, options());
    Sgd optimizer(fsdp.parameters(), {.lr = 1});
    const auto x = own_rows(wave({kRows, 6}, 0), comm);
    const auto old = fsdp(x).pow(2).mean();
    fsdp(x).pow(2).mean().backward();
    optimizer.step();
    fsdp(x);
    old.backward();
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.failed());
}

}  // namespace
}  // namespace lockstep::test::steps_test
