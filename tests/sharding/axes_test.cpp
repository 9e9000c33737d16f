// Sharding beside tensor parallel layers, over Gloo, and what is refused.
#include <gtest/gtest.h>

#include <thread>

#include "comm/backend.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/clock.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/tensor_parallel.hpp"
#include "net/store.hpp"
#include "sharding_support.hpp"

namespace lockstep::test::axes_test {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out) {
  torch::nn::Linear made(in, out);
  made->to(torch::kDouble);
  fill_weights(*made);
  return made;
}

// One block whose inner features are divided over the tensor axis, and a norm that is whole.
torch::nn::Sequential block(const Communicator& axis) {
  torch::nn::Sequential net(ColumnLinear(linear(6, 30), axis), torch::nn::Tanh(),
                            RowLinear(linear(30, 6), axis),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  net->to(torch::kDouble);
  return net;
}

TEST(ShardedAxes, TensorParallelLayersClippedByTheWholeNorm) {
  const auto x = wave({12, 6}, 0);
  auto one = block(Communicator::self());
  Sgd alone(one->parameters(), {.lr = 0.1, .momentum = 0.9});
  std::vector<double> norms;
  for (int step = 0; step < 3; ++step) {
    torch::mse_loss(one->forward(x), torch::sin(x * 3)).mul(10).backward();
    norms.push_back(alone.step(StepExtras{.max_norm = 0.05, .zero_grad = true}).item<double>());
  }
  const auto wanted = one->forward(x);
  for (const ShardStage stage : kStages) {
    run_ranks(4, [&](const Communicator& world) {
      const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
      auto net = block(mesh.axis("tp"));
      FullyShardedDataParallel fsdp(net, mesh.axis("dp"), {.stage = stage, .min_unit_bytes = 0});
      Sgd optimizer(fsdp.parameters(), {.lr = 0.1, .momentum = 0.9});
      const auto mine = own_rows(x, mesh.axis("dp"));
      for (size_t step = 0; step < norms.size(); ++step) {
        torch::mse_loss(fsdp(mine), torch::sin(mine * 3)).mul(10).backward();
        const auto norm = optimizer.step(StepExtras{.max_norm = 0.05, .zero_grad = true});
        EXPECT_NEAR(norm.item<double>(), norms[step], 1e-9);
      }
      const torch::NoGradGuard no_grad;
      expect_near_all(fsdp(x), wanted, "output", 1e-9);
    });
  }
}

// Ranks as threads over Gloo.
void run_gloo_ranks(int size, const std::function<void(const Communicator&)>& body) {
  const auto store = make_local_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const Communicator comm(
            make_network_backend("gloo", {.store = store,
                                          .rank = rank,
                                          .size = size,
                                          .address = "127.0.0.1",
                                          .deadline_ns = monotonic_ns() + int64_t{60'000'000'000}}),
            std::chrono::seconds(60));
        body(comm);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Gloo adds in another order.
TEST(ShardedAxes, GlooGivesTheNumbersOfSharedMemory) {
  for (const ShardStage stage : kStages) {
    torch::Tensor over_shm, over_gloo;
    const auto body = [&](torch::Tensor& result) {
      return [&](const Communicator& comm) {
        auto net = three_layers();
        FullyShardedDataParallel fsdp(net, comm, {.stage = stage, .min_unit_bytes = 0});
        AdamW optimizer(fsdp.parameters(), {.lr = 0.01});
        for (int step = 0; step < 3; ++step) {
          for (int micro = 0; micro < 3; ++micro) {
            std::optional<NoSync> no_sync;
            if (micro == 0) no_sync.emplace(fsdp);
            const auto x = own_rows(wave({30, 6}, step + 0.2 * micro), comm);
            fsdp(x).pow(2).mean().div(3).backward();
          }
          const torch::NoGradGuard no_grad;
          fsdp(wave({2, 6}, 0));  // an evaluation before the update
          optimizer.step(StepExtras{.max_norm = 0.05, .zero_grad = true});
        }
        const auto weights = whole_weights(fsdp);
        if (comm.rank() == 0) result = weights;
      };
    };
    for (const int size : {2, 5}) {
      run_ranks(size, body(over_shm));
      run_gloo_ranks(size, body(over_gloo));
      expect_near_all(over_gloo, over_shm,
                      "stage " + std::to_string(static_cast<int>(stage)) + " on " +
                          std::to_string(size) + " ranks",
                      1e-12);
    }
  }
}

TEST(ShardedRefusals, OtherWrappersOfOneModule) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    {
      DistributedDataParallel ddp(net, comm);
      expect_error(Code::kUsage, {"0.weight", "DistributedDataParallel"},
                   [&] { FullyShardedDataParallel fsdp(net, comm); });
    }
    FullyShardedDataParallel fsdp(net, comm);
    expect_error(Code::kUsage, {"DistributedDataParallel", "0.weight", "sharded"},
                 [&] { DistributedDataParallel ddp(net, comm); });
    expect_error(Code::kUsage, {"FullyShardedDataParallel", "sharded"},
                 [&] { FullyShardedDataParallel second(net, comm); });
    comm.barrier();
  });
}

TEST(ShardedRefusals, NamesThatAreNoUnits) {
  auto net = three_layers();
  expect_error(Code::kUsage, {"1"},
               [&] { FullyShardedDataParallel fsdp(net, Communicator::self(), {.units = {"1"}}); });
}

TEST(ShardedRefusals, ModelWithoutTrainedParameters) {
  torch::nn::Sequential net{torch::nn::ReLU()};
  expect_error(Code::kUsage, {"no trained parameter"},
               [&] { FullyShardedDataParallel fsdp(net, Communicator::self()); });
}

TEST(ShardedRefusals, ConvertedParameters) {
  run_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.stage = ShardStage::kOptimizer});
    {
      const GatheredParameters gathered(fsdp);
      net->to(torch::kFloat);
    }
    try {
      fsdp(wave({2, 6}, 0));
      ADD_FAILURE() << "a converted module was accepted";
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == Code::kSyncMisuse || error.code() == Code::kRankFailed)
          << error.block();
    }
  });
}

// A rank that fails does not leave others with parameters that are not there.
TEST(ShardedRefusals, FailureOfAPeerInsideForward) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0, .share_on_host = false});
    if (comm.rank() == 1) {
      comm.abort("gone");
      return;
    }
    fsdp(wave({2, 6}, 0));
  });
  EXPECT_TRUE(outcomes[0].failed());
  EXPECT_NE(outcomes[0].text().find("gone"), std::string::npos) << outcomes[0].text();
}

TEST(ShardedRefusals, BackwardOnAnotherThread) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    auto net = three_layers();
    FullyShardedDataParallel fsdp(net, comm, {.min_unit_bytes = 0, .share_on_host = false});
    const auto loss = fsdp(wave({2, 6}, 0)).sum();
    std::exception_ptr error;
    std::thread([&] {
      try {
        loss.backward();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.failed());
  }
}

}  // namespace
}  // namespace lockstep::test::axes_test
