// What a program does with gradients and weights while a window is open: it keeps a gradient, or
// changes a weight. Each test compares with one process or with what PyTorch does.

#include <torch/torch.h>

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::gradient_window_test {
namespace {

class GradientWindow : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GradientWindow, testing::Values(1, 2, 3, 5),
                         [](const auto& ranks) { return std::to_string(ranks.param); });

// ---- Gradients that are kept -----------------------------------------------------------------

TEST_P(GradientWindow, AKeptGradientStaysWhatItWas) {
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

TEST_P(GradientWindow, AKeptGradientStaysWhenAnotherOneIsSet) {
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

TEST_P(GradientWindow, WhatATensorHookKeepsStaysTheLocalGradient) {
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

TEST(GradientWindows, AKeptGradientStaysWhileOthersGoOnInAJoin) {
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

TEST_P(GradientWindow, APipelineLeavesKeptGradientsAlone) {
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

TEST_P(GradientWindow, SharpnessAwareMinimisationRuns) {
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
TEST_P(GradientWindow, AClampedCriticTrains) {
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

TEST(GradientWindows, APerturbationThatIsNotUndoneIsRefused) {
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

// torch::optim::SGD changes no version counter.
TEST(GradientWindows, AnUpdateOfLowPrecisionInsideNoSyncIsRefused) {
  for (const auto& outcome : outcomes_of_ranks(2, [](const Communicator& comm) {
         TwoLayers net;
         net->to(torch::kBFloat16);
         DistributedDataParallel ddp(net, comm);
         torch::optim::SGD optimizer(ddp.parameters(), 0.5);
         const auto x = rows(4, 6, comm.rank()).to(torch::kBFloat16);
         {
           const NoSync no_sync(ddp);
           ddp(x).square().sum().backward();
         }
         optimizer.step();
         ddp(x);
       })) {
    EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
  }
}

// Inside a join each rank drops windows of its own. Afterwards all drop the same ones, and compare
// their weights in the same steps.
TEST(GradientWindows, PerturbedWeightsInAJoinAreComparedByAllRanksOrNone) {
  run_ranks(3, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    join(ddp, [&] { sam_steps(comm, ddp, 1 + comm.rank(), /*restores=*/true, Drop::kReset); });
    sam_steps(comm, ddp, 5, /*restores=*/true, Drop::kReset);
  });
}

TEST(GradientWindows, ThePerturbationCheckCanBeTurnedOff) {
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

TEST_P(GradientWindow, AnEmbeddingWithMaxNormAccumulates) {
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

}  // namespace
}  // namespace lockstep::test::gradient_window_test
