// DistributedDataParallel: parameters that a step leaves out, and graphs that never change.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

TEST(DdpUnused, IsNamedInTheFirstStep) {
  for (const int size : {1, 3}) {
    const auto outcomes = outcomes_of_ranks(size, [](const Communicator& comm) {
      Branches net;
      DistributedDataParallel ddp(net, comm);
      ddp(value(1), true, false).sum().backward();
    });
    for (const auto& outcome : outcomes) {
      ASSERT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find("right"), std::string::npos) << outcome.text();
    }
  }
}

TEST(DdpUnused, UsedElsewhereGetsTheMeanAndUsedNowhereStaysUntouched) {
  run_ranks(2, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(net, comm, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(value(2), comm.rank() == 0, false).sum().backward();
      EXPECT_FLOAT_EQ(net->always.grad().item<float>(), 2.0F);
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 1.0F);
      EXPECT_FALSE(net->right.grad().defined());
    }
    net->zero_grad();
    ddp(value(2), comm.rank() == 0, comm.rank() == 1).sum().backward();
    EXPECT_FLOAT_EQ(net->right.grad().item<float>(), 1.0F);
  });
}

TEST(DdpUnused, OneRankAloneMayLeaveParametersOut) {
  Branches net;
  DistributedDataParallel ddp(net, Communicator::self(), {.find_unused_parameters = true});
  ddp(value(2), false, true).sum().backward();
  EXPECT_FALSE(net->left.grad().defined());
  EXPECT_FLOAT_EQ(net->right.grad().item<float>(), 2.0F);
}

TEST(DdpStatic, WhatTheFirstStepDidEveryStepDoes) {
  run_ranks(2, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(
        net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .static_graph = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(value(1.0 + comm.rank()), true, false).sum().backward();
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 1.5F);
      EXPECT_FALSE(net->right.grad().defined());
    }
  });
}

TEST(DdpUnused, OutputsThatTheLossLeavesOutAreUnused) {
  struct Heads : torch::nn::Module {
    Heads() {
      left = register_parameter("left", torch::ones({1}));
      right = register_parameter("right", torch::ones({1}));
    }
    std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
      return {x * left, x * right};
    }
    torch::Tensor left, right;
  };
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<Heads>();
    DistributedDataParallel<Heads> ddp(net, comm, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      const auto [left, right] = ddp(value(2));
      (comm.rank() == 0 ? left : right).sum().backward();
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 1.0F);
      EXPECT_FLOAT_EQ(net->right.grad().item<float>(), 1.0F);
      net->zero_grad(true);
      std::get<0>(ddp(value(2))).sum().backward();
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 2.0F);
      EXPECT_FALSE(net->right.grad().defined());
    }
  });
}

TEST(DdpUnused, TwoForwardsOfOneBackwardMayUseDifferentParameters) {
  run_ranks(2, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(
        net, comm,
        {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      const double mine = 1.0 + comm.rank();
      (ddp(value(mine), true, false) + ddp(value(mine), false, true)).sum().backward();
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 1.5F);
      EXPECT_FLOAT_EQ(net->right.grad().item<float>(), 1.5F);
    }
  });
}

TEST(DdpUnused, AnEvaluationBetweenForwardAndBackwardChangesNothing) {
  run_ranks(2, [](const Communicator& comm) {
    Branches net;
    DistributedDataParallel ddp(
        net, comm,
        {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      const auto loss = ddp(value(1.0 + comm.rank()), true, false).sum();
      net->eval();
      ddp(value(1), false, true);
      net->train();
      loss.backward();
      EXPECT_FLOAT_EQ(net->left.grad().item<float>(), 1.5F);
      EXPECT_FALSE(net->right.grad().defined());
    }
  });
}

TEST(DdpStatic, BucketsFollowTheOrderOfReadiness) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(
        net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .static_graph = true});
    for (int step = 0; step < 2; ++step) ddp(rows(4, 6, step)).sum().backward();
    const auto buckets = ddp.buckets();
    EXPECT_TRUE(buckets.front().parameters[0].starts_with("second")) << buckets[0].parameters[0];
    EXPECT_TRUE(buckets.back().parameters[0].starts_with("first")) << buckets[3].parameters[0];
  });
}

}  // namespace
}  // namespace lockstep::test
