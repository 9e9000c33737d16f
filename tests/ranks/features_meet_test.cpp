// Features combined in one program: who owns which weight and which gradient. Each test compares
// with one process or with what PyTorch does.

#include <torch/torch.h>

#include <limits>
#include <sstream>

#include "ddp_nets.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

class FeaturesMeet : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FeaturesMeet, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

torch::Tensor flat_weights(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> flat;
  for (const auto& each : parameters) flat.push_back(each.detach().to(torch::kFloat).flatten());
  return torch::cat(flat);
}

// Expects the same bits on all ranks.
void expect_same_on_all(const Communicator& comm, const torch::Tensor& values,
                        const std::string& what) {
  const torch::Tensor first = values.clone();
  comm.broadcast(first, 0);
  EXPECT_TRUE(torch::equal(values, first)) << what << " on rank " << comm.rank() << " is off by "
                                           << (values - first).abs().max().item<double>();
}

// Weights that differ between ranks, as in programs that seed by rank.
void make_different(torch::nn::Module& module, const Communicator& comm) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.add_(0.25 * comm.rank());
}

torch::Tensor bf16_rows(const Communicator& comm) {
  return rows(4, 6, 1.0 + comm.rank()).to(torch::kBFloat16);
}

std::vector<torch::Tensor> masters_of(const torch::nn::Module& module,
                                      const MasterWeights& masters) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(masters.of(parameter));
  return all;
}

// ---- MasterWeights ---------------------------------------------------------------------------

TEST_P(FeaturesMeet, DdpBroadcastsMasterWeightsToo) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    const auto expected = flat_weights(net->parameters()).clone();
    make_different(*net, comm);
    MasterWeights masters(*net);
    DistributedDataParallel ddp(net, comm);
    EXPECT_TRUE(torch::equal(flat_weights(masters_of(*net, masters)), expected))
        << "rank " << comm.rank() << " has not rank 0's float32 weights";
    Sgd optimizer(ddp.parameters(), {.lr = 0.1, .masters = masters});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      ddp(bf16_rows(comm)).square().mean().backward();
      optimizer.step();
      expect_same_on_all(comm, flat_weights(masters_of(*net, masters)), "a master weight");
      ddp.check_replicas();
    }
  });
}

TEST_P(FeaturesMeet, JoinBroadcastsMasterWeightsToo) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    MasterWeights masters(*net);
    DistributedDataParallel ddp(net, comm);
    Sgd optimizer(ddp.parameters(), {.lr = 0.1, .masters = masters});
    join(ddp, [&] {
      for (int step = 0; step <= comm.rank(); ++step) {
        optimizer.zero_grad();
        ddp(bf16_rows(comm)).square().mean().backward();
        optimizer.step();
      }
    });
    expect_same_on_all(comm, flat_weights(net->parameters()), "a weight");
    expect_same_on_all(comm, flat_weights(masters_of(*net, masters)), "a master weight");
  });
}

// The last step of the rank that trains longest overflows: it is skipped, and the weights that all
// ranks end with are those before it.
TEST_P(FeaturesMeet, AScalerSkipsAStepInsideAJoin) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.nonfinite = Nonfinite::kIgnore});
    Sgd optimizer(ddp.parameters(), {.lr = 0.1});
    GradScaler scaler({.init_scale = 1024});
    torch::Tensor before;
    join(ddp, [&] {
      for (int step = 0; step <= comm.rank() + 1; ++step) {
        optimizer.zero_grad();
        before = flat_weights(net->parameters()).clone();
        const bool overflows = step == comm.size();
        const auto loss = ddp(rows(4, 6, step + comm.rank())).square().mean();
        scaler.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss).backward();
        scaler.step(optimizer);
        scaler.update();
      }
    });
    expect_same_on_all(comm, flat_weights(net->parameters()), "a weight");
    EXPECT_TRUE(flat_weights(net->parameters()).isfinite().all().item<bool>());
    const bool longest = comm.rank() + 1 == comm.size();
    EXPECT_EQ(scaler.get_scale(), longest ? 512 : 1024);
    EXPECT_TRUE(!longest || torch::equal(flat_weights(net->parameters()), before));
  });
}

// Replicas get the rounded weights, the home device updates the float32 ones.
TEST_P(FeaturesMeet, DataParallelTrainsMasterWeightsWithAScaler) {
  const auto train = [](const std::string& spec) {
    Devices devices(spec);
    const UseDevice home(devices[0]);
    TwoLayers net;
    MasterWeights masters(*net);
    DataParallel<TwoLayersImpl> parallel(net, devices,
                                         [] { return std::make_shared<TwoLayersImpl>(); });
    Sgd optimizer(net->parameters(), {.lr = 0.5, .momentum = 0.9, .masters = masters});
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 5; ++step) {
      const auto out = parallel(rows(30, 6, step).to(torch::kBFloat16)).to(torch::kFloat);
      const auto loss = torch::mse_loss(out, rows(30, 3, 1));
      const bool overflows = step == 2;
      scaler.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss).backward();
      scaler.step(optimizer, {.max_norm = 0.1, .zero_grad = true});
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 512);
    return flat_weights(masters_of(*net, masters)).clone();
  };
  const auto expected = train("cpu:1");
  const auto weights = train("cpu:" + std::to_string(GetParam()));
  EXPECT_TRUE(torch::allclose(weights, expected, 0, 2e-3))
      << "off by " << (weights - expected).abs().max().item<double>();
}

TEST_P(FeaturesMeet, APipelinesDataAxisBroadcastsMasterWeightsToo) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    make_different(*net, comm);
    const torch::nn::Sequential stage(net->first, torch::nn::Tanh(), net->second);
    MasterWeights masters(*net);
    Pipeline pipeline(
        {stage}, Devices("cpu:1"), gpipe(1, 2),
        {.loss = [](const torch::Tensor& out,
                    const torch::Tensor& y) { return torch::mse_loss(out.to(torch::kFloat), y); },
         .data = comm});
    Sgd optimizer(pipeline.parameters(), {.lr = 0.1, .masters = masters});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      pipeline.step(bf16_rows(comm), torch::zeros({4, 3}));
      optimizer.step();
      expect_same_on_all(comm, flat_weights(masters_of(*net, masters)), "a master weight");
    }
  });
}

TEST(MasterWeightsChanges, WhatALoadWritesIsTakenOver) {
  TwoLayers net;
  TwoLayers other;
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : other->parameters()) parameter.mul_(3);
  }
  MasterWeights other_masters(*other);
  std::stringstream file;
  torch::save(other, file);

  MasterWeights masters(*net);
  Sgd optimizer(net->parameters(), {.lr = 1e-6, .masters = masters});
  torch::load(net, file);
  net(rows(4, 6, 0).to(torch::kBFloat16)).sum().backward();
  const auto loaded = flat_weights(net->parameters());
  optimizer.step();
  EXPECT_TRUE(torch::allclose(flat_weights(net->parameters()), loaded, 1e-2, 1e-4))
      << "the update went back to the weights before the load";
  EXPECT_TRUE(torch::allclose(flat_weights(net->parameters()),
                              flat_weights(masters_of(*net, masters)), 1e-2));
}

TEST(MasterWeightsChanges, OnlyChangedElementsLoseTheirPrecision) {
  TwoLayers net;
  MasterWeights masters(*net);
  const auto before = masters.of(net->first->weight).clone();
  {
    const torch::NoGradGuard no_grad;
    net->first->weight[0][0] = 5;
  }
  const auto after = masters.of(net->first->weight);
  EXPECT_EQ(after[0][0].item<float>(), 5);
  EXPECT_TRUE(torch::equal(after.flatten().slice(0, 1), before.flatten().slice(0, 1)));
}

// ---- Parameters that two wrappers share ------------------------------------------------------

// Two heads on one trunk.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const torch::nn::Linear& shared) {
    trunk = register_module("trunk", shared);
    head = register_module("head", torch::nn::Linear(8, 3));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : head->parameters()) {
      parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()).mul(0.7).cos());
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(trunk(x))); }
  torch::nn::Linear trunk{nullptr}, head{nullptr};
};
TORCH_MODULE(Head);

torch::nn::Linear make_trunk() {
  return TwoLayers()->first;
}

enum class Backwards { kOne, kOneEach, kForwardsFirst };

torch::Tensor loss_of(const torch::Tensor& out) {
  return out.square().mean();
}

// The trunk's gradient after one step of both heads, on all rows in one process.
torch::Tensor trunk_gradient(int ranks) {
  const auto trunk = make_trunk();
  Head left(trunk);
  Head right(trunk);
  torch::Tensor loss = torch::zeros({});
  for (int rank = 0; rank < ranks; ++rank) {
    loss = loss + loss_of(left(rows(4, 6, rank))) + loss_of(right(rows(4, 6, 7 + rank)));
  }
  (loss / ranks).backward();
  return trunk->weight.grad().clone();
}

TEST_P(FeaturesMeet, ASharedParameterIsAveragedByBothOfItsWrappers) {
  const auto expected = trunk_gradient(GetParam());
  for (const auto backwards : {Backwards::kOne, Backwards::kOneEach, Backwards::kForwardsFirst}) {
    run_ranks(GetParam(), [&](const Communicator& comm) {
      const auto trunk = make_trunk();
      Head left(trunk);
      Head right(trunk);
      // The smallest buckets: some are in flight while others are filled.
      const DdpOptions options{.first_bucket_bytes = 64, .bucket_cap_bytes = 64};
      DistributedDataParallel left_ddp(left, comm, options);
      DistributedDataParallel right_ddp(right, comm, options);
      for (int step = 0; step < 20; ++step) {
        left->zero_grad(true);
        right->zero_grad(true);
        const auto x = rows(4, 6, comm.rank());
        const auto y = rows(4, 6, 7 + comm.rank());
        switch (backwards) {
          case Backwards::kOne:
            (loss_of(left_ddp(x)) + loss_of(right_ddp(y))).backward();
            break;
          case Backwards::kOneEach:
            loss_of(left_ddp(x)).backward();
            loss_of(right_ddp(y)).backward();
            break;
          case Backwards::kForwardsFirst: {
            const auto left_loss = loss_of(left_ddp(x));
            const auto right_loss = loss_of(right_ddp(y));
            left_loss.backward();
            right_loss.backward();
          }
        }
        expect_close(trunk->weight.grad(), expected,
                     "trunk in step " + std::to_string(step) + " of way " +
                         std::to_string(static_cast<int>(backwards)));
        expect_same_on_all(comm, trunk->weight.grad(), "the trunk's gradient");
        expect_same_on_all(comm, left->head->weight.grad(), "the left head's gradient");
        expect_same_on_all(comm, right->head->weight.grad(), "the right head's gradient");
      }
    });
  }
}

TEST_P(FeaturesMeet, ASharedParameterIsUpdatedWithoutComplaint) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    const auto trunk = make_trunk();
    Head left(trunk);
    Head right(trunk);
    DistributedDataParallel left_ddp(left, comm);
    DistributedDataParallel right_ddp(right, comm);
    torch::optim::SGD left_optimizer(left->parameters(), 0.1);
    torch::optim::SGD right_optimizer(right->head->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      left->zero_grad(true);
      right->zero_grad(true);
      loss_of(left_ddp(rows(4, 6, comm.rank()))).backward();
      left_optimizer.step();
      loss_of(right_ddp(rows(4, 6, 7 + comm.rank()))).backward();
      right_optimizer.step();
    }
    left_ddp.check_replicas();
    right_ddp.check_replicas();
  });
}

// One wrapper is constructed, and one destroyed, while the other's gradients accumulate.
TEST_P(FeaturesMeet, AParameterMayBecomeSharedAndStopBeingSo) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    const auto mean = static_cast<float>(1 + comm.size()) / 2;
    Scale net;
    DistributedDataParallel first(net, comm);
    const auto x = value(1.0 + comm.rank());
    first(x).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), mean);
    {
      DistributedDataParallel second(net, comm);
      (first(x) + second(x)).sum().backward();
      EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 3 * mean);
    }
    first(x).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 4 * mean);
  });
}

// ---- A loss that reaches a model without its wrapper -----------------------------------------

// Trains generator and discriminator as a GAN's loop does; the generator's step goes through the
// bare discriminator.
TEST_P(FeaturesMeet, AGeneratorTrainsThroughTheBareDiscriminator) {
  const auto train = [](const Communicator& comm) {
    TwoLayers generator;
    torch::nn::Sequential discriminator(torch::nn::Linear(3, 4), torch::nn::Tanh(),
                                        torch::nn::Linear(4, 1));
    {
      const torch::NoGradGuard no_grad;
      for (auto& each : discriminator->parameters()) {
        each.copy_(torch::arange(each.numel()).view(each.sizes()).mul(0.3).sin());
      }
    }
    DistributedDataParallel g(generator, comm);
    DistributedDataParallel d(discriminator, comm);
    torch::optim::SGD g_optimizer(generator->parameters(), 0.1);
    torch::optim::SGD d_optimizer(discriminator->parameters(), 0.1);
    const int64_t mine = 30 / comm.size();
    const auto own = [&](const torch::Tensor& all) {
      return all.narrow(0, comm.rank() * mine, mine);
    };
    for (int step = 0; step < 5; ++step) {
      d_optimizer.zero_grad();
      d(own(rows(30, 3, step))).mean().backward();
      d(generator(own(rows(30, 6, step))).detach()).neg().mean().backward();
      d_optimizer.step();
      g_optimizer.zero_grad();
      discriminator->forward(g(own(rows(30, 6, step)))).mean().backward();
      g_optimizer.step();
    }
    return torch::cat(
        {flat_weights(generator->parameters()), flat_weights(discriminator->parameters())});
  };
  const auto expected = train(Communicator::self());
  run_ranks(GetParam(),
            [&](const Communicator& comm) { expect_close(train(comm), expected, "weights"); });
}

TEST(FeaturesMeeting, AnUpdateFromGradientsOfTheBareModuleIsRefused) {
  for (const auto& outcome : outcomes_of_ranks(2, [](const Communicator& comm) {
         Scale net;
         DistributedDataParallel ddp(net, comm);
         torch::optim::SGD optimizer(net->parameters(), 0.1);
         net(value(1.0 + comm.rank())).sum().backward();
         optimizer.step();
         ddp(value(1)).sum().backward();
       })) {
    EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
  }
}

// BatchNorm's forward saves its buffers, which a broadcast before the second forward would change.
TEST_P(FeaturesMeet, TwoForwardsAndOneBackwardWorkWithBatchNorm) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      (ddp(rows(8, 6, comm.rank())).sum() + ddp(rows(8, 6, 5 + comm.rank())).square().sum())
          .backward();
      expect_same_on_all(comm, net->parameters()[0].grad(), "a gradient");
    }
    ddp(rows(8, 6, comm.rank()));
    const auto batches = net->named_buffers()["1.num_batches_tracked"];
    EXPECT_EQ(batches.item<int64_t>(), 7);
  });
}

// ---- Gradients that are kept -----------------------------------------------------------------

TEST_P(FeaturesMeet, AKeptGradientStaysWhatItWas) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
    std::vector<torch::Tensor> kept;
    std::vector<torch::Tensor> copies;
    for (int step = 0; step < 4; ++step) {  // the second one rearranges the buckets
      ddp(rows(4, 6, step + comm.rank())).square().sum().backward();
      for (auto& parameter : net->parameters()) {
        kept.push_back(parameter.grad());
        copies.push_back(parameter.grad().clone());
        parameter.mutable_grad().reset();
      }
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      EXPECT_TRUE(torch::equal(kept[i], copies[i])) << "gradient " << i << " was overwritten";
    }
  });
}

TEST_P(FeaturesMeet, AKeptGradientStaysWhenAnotherOneIsSet) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    ddp(value(2)).sum().backward();
    const auto kept = net->weight.grad();
    net->weight.mutable_grad() = value(10);
    ddp(value(3)).sum().backward();
    EXPECT_FLOAT_EQ(kept.item<float>(), 2);
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 13);
  });
}

TEST_P(FeaturesMeet, WhatATensorHookKeepsStaysTheLocalGradient) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    std::vector<torch::Tensor> kept;
    net->weight.register_hook([&](const torch::Tensor& gradient) { kept.push_back(gradient); });
    for (int step = 0; step < 3; ++step) {
      ddp(value(1.0 + comm.rank() + 10 * step)).sum().backward();
      net->zero_grad(true);
    }
    for (size_t step = 0; step < kept.size(); ++step) {
      EXPECT_FLOAT_EQ(kept[step].item<float>(),
                      1.0F + static_cast<float>(comm.rank()) + 10.0F * static_cast<float>(step));
    }
  });
}

TEST(FeaturesMeeting, AKeptGradientStaysWhileOthersGoOnInAJoin) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    torch::Tensor kept;
    join(ddp, [&] {
      for (int step = 0; step < 1 + 2 * comm.rank(); ++step) {
        net->zero_grad(true);
        ddp(value(step + 1)).sum().backward();
        if (step == 0) kept = net->weight.grad();
      }
    });
    EXPECT_FLOAT_EQ(kept.item<float>(), 1);
  });
}

TEST_P(FeaturesMeet, APipelineLeavesKeptGradientsAlone) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    torch::nn::Sequential stage(torch::nn::Linear(6, 3));
    Pipeline pipeline({stage}, Devices("cpu:1"), gpipe(1, 2),
                      {.loss = [](const torch::Tensor& out,
                                  const torch::Tensor& y) { return torch::mse_loss(out, y); },
                       .data = comm});
    auto weight = pipeline.parameters()[0];
    pipeline.step(rows(4, 6, comm.rank()), rows(4, 3, 0));
    const auto kept = weight.grad();
    const auto copy = kept.clone();
    for (auto& each : pipeline.parameters()) each.mutable_grad().reset();
    pipeline.step(rows(4, 6, 3 + comm.rank()), rows(4, 3, 1));
    EXPECT_TRUE(torch::equal(kept, copy));
    EXPECT_FALSE(torch::equal(weight.grad(), copy));
  });
}

// ---- Weights that change inside a window -----------------------------------------------------

// How a program drops gradients: libtorch 1.13's zero_grad() fills them with zeros, later ones'
// resets them.
enum class Drop { kReset, kFill };

// Sharpness-aware minimisation: the first gradient is this rank's own, the second is averaged.
void sam_steps(const Communicator& comm, DistributedDataParallel<TwoLayersImpl>& ddp, int steps,
               bool restores, Drop drop) {
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  const auto loss = [&](int step) {
    return torch::mse_loss(ddp(rows(6, 6, step + comm.rank())), rows(6, 3, 1));
  };
  for (int step = 0; step < steps; ++step) {
    std::vector<torch::Tensor> moves;
    {
      const NoSync no_sync(ddp);
      loss(step).backward();
    }
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : ddp.parameters()) {
        moves.push_back(parameter.grad() * 0.05);
        parameter.add_(moves.back());
        if (drop == Drop::kReset) parameter.mutable_grad().reset();
        if (drop == Drop::kFill) parameter.mutable_grad().zero_();
      }
    }
    loss(step).backward();
    if (restores) {
      const torch::NoGradGuard no_grad;
      const auto parameters = ddp.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_(moves[i]);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST_P(FeaturesMeet, SharpnessAwareMinimisationRuns) {
  for (const Drop drop : {Drop::kReset, Drop::kFill}) {
    run_ranks(GetParam(), [drop](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm);
      sam_steps(comm, ddp, 20, /*restores=*/true, drop);
      const auto weights = flat_weights(net->parameters());
      const auto first = weights.clone();
      comm.broadcast(first, 0);
      EXPECT_TRUE(torch::allclose(weights, first, 1e-5, 1e-6));
    });
  }
}

// WGAN: the generator's loss leaves gradients in the critic, whose weights are clamped before its
// own next step begins with zero_grad().
TEST_P(FeaturesMeet, AClampedCriticTrains) {
  for (const Drop drop : {Drop::kReset, Drop::kFill}) {
    run_ranks(GetParam(), [drop](const Communicator& comm) {
      TwoLayers critic;
      torch::nn::Linear generator(6, 6);
      DistributedDataParallel ddp(critic, comm);
      DistributedDataParallel made(generator, comm);
      torch::optim::SGD critic_optimizer(ddp.parameters(), 0.1);
      torch::optim::SGD generator_optimizer(made.parameters(), 0.1);
      for (int step = 0; step < 6; ++step) {
        for (auto& each : critic->parameters()) {
          if (!each.grad().defined()) continue;
          if (drop == Drop::kReset) each.mutable_grad().reset();
          if (drop == Drop::kFill) each.mutable_grad().zero_();
        }
        ddp(rows(4, 6, step + comm.rank())).mean().backward();
        critic_optimizer.step();
        generator_optimizer.zero_grad();
        critic->forward(made(rows(4, 6, 9 + step + comm.rank()))).mean().neg().backward();
        generator_optimizer.step();
        const torch::NoGradGuard no_grad;
        for (auto& each : critic->parameters()) each.clamp_(-0.3, 0.3);
      }
      expect_same_on_all(comm, flat_weights(critic->parameters()), "the critic");
      expect_same_on_all(comm, flat_weights(generator->parameters()), "the generator");
    });
  }
}

TEST(FeaturesMeeting, APerturbationThatIsNotUndoneIsRefused) {
  for (const Drop drop : {Drop::kReset, Drop::kFill}) {
    for (const auto& outcome : outcomes_of_ranks(3, [drop](const Communicator& comm) {
           TwoLayers net;
           DistributedDataParallel ddp(net, comm);
           sam_steps(comm, ddp, 3, /*restores=*/false, drop);
         })) {
      EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
    }
  }
}

TEST(FeaturesMeeting, ThePerturbationCheckCanBeTurnedOff) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.check_unaveraged_updates = false});
    sam_steps(comm, ddp, 3, /*restores=*/false, Drop::kReset);
  });
}

// Its forward shortens the rows that it looks up.
struct BoundedImpl : torch::nn::Module {
  BoundedImpl() {
    embedding = register_module(
        "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).max_norm(0.5)));
    const torch::NoGradGuard no_grad;
    embedding->weight.fill_(1);
  }
  torch::Tensor forward(const torch::Tensor& x) { return embedding(x); }
  torch::nn::Embedding embedding{nullptr};
};
TORCH_MODULE(Bounded);

TEST_P(FeaturesMeet, AnEmbeddingWithMaxNormAccumulates) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    Bounded net;
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t micro = 0; micro < 3; ++micro) {
        std::optional<NoSync> no_sync;
        if (micro < 2) no_sync.emplace(ddp);
        ddp(torch::tensor({micro, (micro + comm.rank()) % 8, step})).sum().backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

// ---- Clipping where ranks hold parts of a model ----------------------------------------------

constexpr double kMaxNorm = 0.05;  // far below the norms here: every step is clipped

// Layers whose weights are the same in every process: whole, or divided over an axis.
torch::nn::Linear linear(int64_t in, int64_t out) {
  torch::nn::Linear made(in, out);
  const torch::NoGradGuard no_grad;
  for (auto& each : made->parameters()) {
    each.copy_(torch::arange(each.numel()).view(each.sizes()).mul(0.41).sin().mul(0.5));
  }
  return made;
}

torch::nn::Sequential divided_block(const Communicator& axis) {
  return torch::nn::Sequential(ColumnLinear(linear(6, 30), axis), torch::nn::Tanh(),
                               RowLinear(linear(30, 6), axis),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
}

torch::Tensor block_loss(const torch::Tensor& out) {
  return torch::mse_loss(out, rows(out.size(0), 6, 2)) * 10;
}

// How a step clips.
enum class Clip { kOptimizer, kScaler, kScalerWithGroup, kScalerAfterUnscale };
constexpr Clip kClips[] = {Clip::kOptimizer, Clip::kScaler, Clip::kScalerWithGroup,
                           Clip::kScalerAfterUnscale};

template <class Optimizer>
double clipped_step(Clip clip, Optimizer& optimizer, GradScaler& scaler) {
  torch::Tensor norm;
  if (clip == Clip::kOptimizer) {
    norm = optimizer.step(StepExtras{.max_norm = kMaxNorm, .zero_grad = true});
  } else {
    if (clip == Clip::kScalerAfterUnscale) scaler.unscale_(optimizer);
    norm = scaler.step(optimizer, {.max_norm = kMaxNorm, .zero_grad = true});
    scaler.update();
  }
  return norm.template item<double>();
}

GradScaler scaler_for(Clip clip, const Communicator& group) {
  GradScalerOptions options{.init_scale = 1024};
  if (clip == Clip::kScalerWithGroup) options.model_parallel = group;
  return GradScaler(options);
}

torch::Tensor scaled(Clip clip, GradScaler& scaler, const torch::Tensor& loss) {
  return clip == Clip::kOptimizer ? loss : scaler.scale(loss);
}

struct Trained {
  std::vector<double> norms;
  torch::Tensor column, row, bias, norm_weight;
};

Trained train_block(Clip clip, const Communicator& axis) {
  auto block = divided_block(axis);
  Sgd optimizer(block->parameters(), {.lr = 1, .momentum = 0.9});
  GradScaler scaler = scaler_for(clip, axis);
  Trained trained;
  for (int step = 0; step < 4; ++step) {
    scaled(clip, scaler, block_loss(block->forward(rows(5, 6, step)))).backward();
    trained.norms.push_back(clipped_step(clip, optimizer, scaler));
  }
  trained.column = block[0]->as<ColumnLinear>()->whole_weight();
  trained.row = block[2]->as<RowLinear>()->whole_weight();
  trained.bias = block[2]->as<RowLinear>()->bias.detach();
  trained.norm_weight = block[3]->as<torch::nn::LayerNorm>()->weight.detach();
  return trained;
}

TEST_P(FeaturesMeet, ATensorParallelModelIsClippedByTheNormOfTheWhole) {
  for (const Clip clip : kClips) {
    const Trained expected = train_block(clip, Communicator::self());
    run_ranks(GetParam(), [&](const Communicator& axis) {
      const Trained trained = train_block(clip, axis);
      expect_close(trained.column, expected.column, "column weight");
      expect_close(trained.row, expected.row, "row weight");
      expect_close(trained.bias, expected.bias, "bias");
      expect_close(trained.norm_weight, expected.norm_weight, "norm");
      expect_same_on_all(axis, trained.bias, "the whole bias");
      expect_same_on_all(axis, trained.norm_weight, "the whole norm");
      for (size_t i = 0; i < expected.norms.size(); ++i) {
        EXPECT_NEAR(trained.norms[i], expected.norms[i], 1e-5 * expected.norms[i]);
      }
    });
  }
}

// Only one rank's slice overflows, and no model-parallel group was given.
TEST_P(FeaturesMeet, ATensorParallelStepIsSkippedByAllRanksOrNone) {
  run_ranks(GetParam(), [](const Communicator& axis) {
    auto block = divided_block(axis);
    Sgd optimizer(block->parameters(), {.lr = 1});
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 3; ++step) {
      const auto before = flat_weights(block->parameters()).clone();
      scaler.scale(block_loss(block->forward(rows(5, 6, step)))).backward();
      if (step == 1 && axis.rank() == axis.size() - 1) {
        block->parameters()[0].grad().fill_(std::numeric_limits<float>::infinity());
      }
      scaler.step(optimizer, {.zero_grad = true});
      scaler.update();
      EXPECT_EQ(torch::equal(flat_weights(block->parameters()), before), step == 1) << step;
    }
    EXPECT_EQ(scaler.get_scale(), 512);
  });
}

// Parts of different lengths, so that each rank's own norm differs.
std::vector<torch::nn::Sequential> pipeline_stages(int stages, const Communicator& tensor) {
  std::vector<torch::nn::Sequential> all;
  for (int i = 0; i < stages; ++i) {
    all.push_back(i == 1 ? divided_block(tensor)
                         : torch::nn::Sequential(linear(6, 6), torch::nn::Tanh()));
  }
  return all;
}

std::vector<torch::Tensor> one_device(Clip clip, int stages) {
  auto modules = pipeline_stages(stages, Communicator::self());
  std::vector<torch::Tensor> parameters;
  for (const auto& module : modules) {
    for (const auto& each : module->parameters()) parameters.push_back(each);
  }
  Sgd optimizer(parameters, {.lr = 1});
  GradScaler scaler = scaler_for(clip, Communicator::self());
  for (int step = 0; step < 3; ++step) {
    auto out = rows(8, 6, step);
    for (auto& module : modules) out = module->forward(out);
    scaled(clip, scaler, block_loss(out)).backward();
    clipped_step(clip, optimizer, scaler);
  }
  return parameters;
}

// A pipeline with tensor ranks; with one tensor rank it is the plain pipeline.
TEST(ClippedPipeline, IsClippedByTheNormOfTheWhole) {
  for (const int stages : {2, 3}) {
    for (const int tensor_ranks : {1, 2}) {
      for (const Clip clip : kClips) {
        const auto expected = one_device(clip, stages);
        run_ranks(stages * tensor_ranks, [&](const Communicator& world) {
          const Mesh mesh(world, {{"pp", stages}, {"tp", tensor_ranks}});
          Devices devices("cpu:1");
          Pipeline pipeline(pipeline_stages(stages, mesh.axis("tp")), mesh.axis("pp"), devices[0],
                            gpipe(stages, 2),
                            {.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
                              return torch::mse_loss(out, y) * 10;
                            }});
          Sgd optimizer(pipeline.parameters(), {.lr = 1});
          GradScaler scaler = scaler_for(clip, mesh.plane({"pp", "tp"}));
          for (int step = 0; step < 3; ++step) {
            pipeline.step(rows(8, 6, step), rows(8, 6, 2),
                          {.scaler = clip == Clip::kOptimizer ? nullptr : &scaler});
            clipped_step(clip, optimizer, scaler);
          }
          // The divided block is compared in ATensorParallelModelIsClippedByTheNormOfTheWhole.
          const int stage = mesh.axis("pp").rank();
          if (stage == 1 && tensor_ranks > 1) return;
          const size_t begin = stage == 2 ? expected.size() - 2 : (stage == 1 ? 2 : 0);
          const auto mine = pipeline.stage(stage)->parameters();
          for (size_t i = 0; i < mine.size(); ++i) {
            expect_close(mine[i], expected[begin + i], "stage " + std::to_string(stage));
          }
        });
      }
    }
  }
}

TEST(ClippedParts, ThatLockstepDidNotDivideAreNamedInTheStep) {
  std::vector<torch::Tensor> whole;
  for (int rank = 0; rank < 3; ++rank) whole.push_back(torch::ones({1 + rank}).requires_grad_());
  (whole[0].sum() + 2 * whole[1].sum() + 3 * whole[2].sum()).backward();
  Sgd reference(whole, {.lr = 1});
  const auto norm = reference.step(StepExtras{.max_norm = 0.5}).item<double>();
  run_ranks(3, [&](const Communicator& comm) {
    auto part = torch::ones({1 + comm.rank()}).requires_grad_();
    ((comm.rank() + 1) * part.sum()).backward();
    Sgd optimizer({part}, {.lr = 1});
    const auto found = optimizer.step(StepExtras{.max_norm = 0.5, .model_parallel = comm});
    EXPECT_NEAR(found.item<double>(), norm, 1e-9);
    expect_close(part, whole[static_cast<size_t>(comm.rank())], "a part");
  });
}

// A program divides a layer by hand over an axis that lockstep does not know, inside the stages of
// a pipeline that it knows: each weight still counts once.
TEST(ClippedParts, MayLieInsideAPipelineOfRanks) {
  // Every rank of the "hand" axis holds one block of a stage's weight; the model is their sum.
  const auto stage = [](int block) {
    torch::nn::Sequential made(linear(6, 6), torch::nn::Tanh());
    const torch::NoGradGuard no_grad;
    for (auto& each : made->parameters()) each.mul_(1 + 0.5 * block);
    return made;
  };
  const auto loss = [](const torch::Tensor& out, const torch::Tensor& y) {
    return torch::mse_loss(out, y) * 10;
  };
  std::vector<torch::Tensor> whole;  // [block][stage][parameter]
  for (int block = 0; block < 2; ++block) {
    torch::nn::Sequential first = stage(block);
    torch::nn::Sequential second = stage(block);
    loss(second->forward(first->forward(rows(8, 6, block))), rows(8, 6, 2)).backward();
    for (const auto& module : {first, second}) {
      for (const auto& each : module->parameters()) whole.push_back(each);
    }
  }
  Sgd reference(whole, {.lr = 1});
  const auto norm = reference.step(StepExtras{.max_norm = kMaxNorm}).item<double>();
  for (const bool names_both : {false, true}) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"pp", 2}, {"hand", 2}});
      const int block = mesh.axis("hand").rank();
      Devices devices("cpu:1");
      Pipeline pipeline({stage(block), stage(block)}, mesh.axis("pp"), devices[0], gpipe(2, 2),
                        {.loss = loss});
      Sgd optimizer(pipeline.parameters(), {.lr = 1});
      pipeline.step(rows(8, 6, block), rows(8, 6, 2));
      const auto group = names_both ? mesh.plane({"pp", "hand"}) : mesh.axis("hand");
      const auto found = optimizer.step(StepExtras{.max_norm = kMaxNorm, .model_parallel = group});
      EXPECT_NEAR(found.item<double>(), norm, 1e-5 * norm);
      const int number = mesh.axis("pp").rank();
      const auto mine = pipeline.stage(number)->parameters();
      for (size_t i = 0; i < mine.size(); ++i) {
        expect_close(mine[i], whole[static_cast<size_t>(block * 4 + number * 2) + i], "a part");
      }
    });
  }
}

// ---- Other data in a parameter, parameters as outputs ----------------------------------------

TEST_P(FeaturesMeet, AWrappedModuleLoadsWeights) {
  TwoLayers other;
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : other->parameters()) parameter.mul_(2);
  }
  std::ostringstream file;
  torch::save(other, file);
  run_ranks(GetParam(), [&](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    ddp(rows(4, 6, comm.rank())).sum().backward();
    std::istringstream stream(file.str());
    torch::load(net, stream);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad(true);
      ddp(rows(4, 6, comm.rank())).square().sum().backward();
      for (const auto& parameter : net->parameters()) {
        expect_same_on_all(comm, parameter.grad(), "a gradient after the load");
      }
    }
    EXPECT_TRUE(torch::equal(net->first->weight, other->first->weight));
  });
}

TEST(FeaturesMeeting, TheWrapperHasTheModulesEverydayCalls) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    ddp.eval();
    EXPECT_FALSE(net->is_training());
    ddp.train();
    EXPECT_TRUE(ddp.is_training() && net->is_training());
    EXPECT_EQ(ddp.named_parameters().size(), 4U);
    EXPECT_TRUE(ddp.named_parameters()["first.weight"].is_same(net->first->weight));
    ddp(rows(2, 6, 0)).sum().backward();
    ddp.zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(net->first->weight.grad().abs().sum().item<float>(), 0);
    ddp.zero_grad();
    EXPECT_FALSE(net->first->weight.grad().defined());
  });
}

// As CLIP returns its logit scale.
struct ReturnsParameterImpl : torch::nn::Module {
  ReturnsParameterImpl() { scale = register_parameter("scale", torch::ones({1})); }
  std::vector<torch::Tensor> forward(const torch::Tensor& x) { return {x * scale, scale}; }
  torch::Tensor scale;
};
TORCH_MODULE(ReturnsParameter);

TEST_P(FeaturesMeet, AParameterThatIsReturnedGathersNoHooks) {
  run_ranks(GetParam(), [](const Communicator& comm) {
    ReturnsParameter net;
    DistributedDataParallel ddp(net, comm);
    const auto count_hooks = [&] {
      const auto accumulator = torch::autograd::impl::grad_accumulator(net->scale);
      return torch::autograd::impl::hooks(net->scale).size() + accumulator->pre_hooks().size();
    };
    const auto before = count_hooks();
    const auto mean = static_cast<float>(1 + comm.size()) / 2;
    for (int step = 0; step < 5; ++step) {
      const auto out = ddp(value(1.0 + comm.rank()));
      (out[0] * out[1]).sum().backward();
      EXPECT_FLOAT_EQ(net->scale.grad().item<float>(), 2 * mean);
      net->zero_grad(true);
    }
    EXPECT_EQ(count_hooks(), before);
  });
}

}  // namespace
}  // namespace lockstep::test
