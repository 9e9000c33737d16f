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

namespace lockstep::test::feature_interactions_test {
namespace {

class FeatureInteractions : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FeatureInteractions, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

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

TEST_P(FeatureInteractions, DdpBroadcastsMasterWeightsToo) {
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

TEST_P(FeatureInteractions, JoinBroadcastsMasterWeightsToo) {
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
TEST_P(FeatureInteractions, AScalerSkipsAStepInsideAJoin) {
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
TEST_P(FeatureInteractions, DataParallelTrainsMasterWeightsWithAScaler) {
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

TEST_P(FeatureInteractions, APipelinesDataAxisBroadcastsMasterWeightsToo) {
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

TEST_P(FeatureInteractions, ASharedParameterIsAveragedByBothOfItsWrappers) {
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

TEST_P(FeatureInteractions, ASharedParameterIsUpdatedWithoutComplaint) {
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
TEST_P(FeatureInteractions, AParameterMayBecomeSharedAndStopBeingSo) {
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
TEST_P(FeatureInteractions, AGeneratorTrainsThroughTheBareDiscriminator) {
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

TEST(FeatureInteractionErrors, AnUpdateFromGradientsOfTheBareModuleIsRefused) {
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
TEST_P(FeatureInteractions, TwoForwardsAndOneBackwardWorkWithBatchNorm) {
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

// ---- Other data in a parameter, parameters as outputs ----------------------------------------

TEST_P(FeatureInteractions, AWrappedModuleLoadsWeights) {
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

TEST(FeatureInteractionErrors, TheWrapperHasTheModulesEverydayCalls) {
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

TEST_P(FeatureInteractions, AParameterThatIsReturnedGathersNoHooks) {
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
}  // namespace lockstep::test::feature_interactions_test
