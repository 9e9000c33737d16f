// DistributedDataParallel: ranks that have more steps than others.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

// Rank r has r + 1 steps; the gradient of each is its input.
TEST(DdpJoin, LateStepsAreDividedByAllOrByTheActive) {
  for (const bool by_all : {true, false}) {
    run_ranks(3, [&](const Communicator& comm) {
      Scale net;
      DistributedDataParallel ddp(net, comm);
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(1.0));
      std::vector<float> gradients;
      join(ddp,
           [&] {
             for (int step = 0; step <= comm.rank(); ++step) {
               optimizer.zero_grad();
               ddp(value(3)).sum().backward();
               gradients.push_back(net->weight.grad().item<float>());
               optimizer.step();
             }
           },
           {.divide_by_initial_world_size = by_all});
      const std::vector<float> expected =
          by_all ? std::vector<float>{3, 2, 1} : std::vector<float>{3, 3, 3};
      float weight = 1;
      for (const float gradient : expected) weight -= gradient;
      for (size_t i = 0; i < gradients.size(); ++i) EXPECT_FLOAT_EQ(gradients[i], expected[i]);
      // All end with the weights of the rank that trained longest.
      EXPECT_FLOAT_EQ(net->weight.item<float>(), weight);
    });
  }
}

TEST(DdpJoin, ARankWithoutAnyDataFollows) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    join(ddp, [&] {
      for (int step = 0; comm.rank() == 1 && step < 4; ++step) {
        optimizer.zero_grad();
        ddp(rows(4, 6, step)).sum().backward();
        optimizer.step();
      }
    });
    ddp.check_replicas();
  });
}

TEST(DdpJoin, EarlyEndCanStopEverybody) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    join(ddp,
         [&] {
           for (int step = 0; step <= comm.rank(); ++step) ddp(value(1)).sum().backward();
         },
         {.throw_on_early_termination = true});
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
  }
}

TEST(DdpJoin, ChecksOfReplicasStayInStepAfterwards) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm, {.check_replicas_every = 2});
    join(ddp, [&] {
      for (int step = 0; step <= comm.rank(); ++step) ddp(value(1)).sum().backward();
    });
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(true);
      ddp(value(1.0 + comm.rank())).sum().backward();
      EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.5F);
    }
  });
}

TEST(DdpJoin, GoesWithAccumulationUnusedParametersAndWeights) {
  run_ranks(3, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(
        net, comm,
        {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .find_unused_parameters = true});
    ddp.set_weight(1.0 + comm.rank());
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    join(ddp,
         [&] {
           for (int step = 0; step < 2 * (comm.rank() + 1); ++step) {
             std::optional<NoSync> no_sync;
             if (step % 2 == 0) no_sync.emplace(ddp);
             ddp(value(1.0 + comm.rank()), step % 4 < 2, false).sum().backward();
             if (no_sync) continue;
             optimizer.step();
             net->zero_grad(true);
           }
         },
         {.divide_by_initial_world_size = false});
    ddp.check_replicas();
    // Weighted means of twice 1, 2, 3 over all; over ranks 1 and 2; of rank 2 alone.
    EXPECT_NEAR(net->always.item<double>(), 1 - 0.1 * (28.0 / 6 + 26.0 / 5 + 6), 1e-5);
    EXPECT_NEAR(net->left.item<double>(), 1 - 0.1 * (28.0 / 6 + 6), 1e-5);
    EXPECT_EQ(net->right.item<double>(), 1);
  });
}

}  // namespace
}  // namespace lockstep::test
