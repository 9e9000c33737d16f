// DistributedDataParallel: no_sync, unused parameters, buffers, uneven inputs, hooks.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

torch::Tensor value(double number) {
  return torch::full({1}, static_cast<float>(number));
}

TEST(DdpNoSync, AccumulatesLocallyAndAveragesTheSum) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    const double mine = 1.0 + comm.rank();
    {
      const NoSync no_sync(ddp);
      ddp(value(mine)).sum().backward();
    }
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), static_cast<float>(mine));
    EXPECT_EQ(ddp.stats().all_reduces, 0);
    EXPECT_EQ(net->weight.grad().data_ptr(), ddp.buckets()[0].gradients.data_ptr());
    ddp(value(mine)).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 3.0F);
    EXPECT_EQ(ddp.stats().all_reduces, 1);
  });
}

TEST(DdpNoSync, NestsAndEndsWithItsScope) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    try {
      const NoSync outer(ddp);
      { const NoSync inner(ddp); }
      ddp(value(1)).sum().backward();
      EXPECT_EQ(ddp.stats().all_reduces, 0);
      throw std::runtime_error("out");
    } catch (const std::runtime_error&) {
    }
    ddp(value(1)).sum().backward();
    EXPECT_EQ(ddp.stats().all_reduces, 1);
  });
}

TEST(DdpNoSync, HalfOfAStepIsRefused) {
  for (const bool forward_inside : {true, false}) {
    const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& comm) {
      Scale net;
      DistributedDataParallel ddp(net, comm);
      torch::Tensor loss;
      if (forward_inside) {
        {
          const NoSync no_sync(ddp);
          loss = ddp(value(1)).sum();
        }
        loss.backward();
      } else {
        loss = ddp(value(1)).sum();
        const NoSync no_sync(ddp);
        loss.backward();
      }
    });
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
      EXPECT_NE(outcome.text().find("half of a step"), std::string::npos) << outcome.text();
    }
  }
}

TEST(Ddp, ABackwardWithoutForwardIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    const auto loss = ddp(value(1)).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kSyncMisuse) << outcome.text();
  }
}

TEST(Ddp, TwoForwardsMayShareOneBackward) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    const double mine = 1.0 + comm.rank();
    (ddp(value(mine)) + ddp(value(10 * mine))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 16.5F);
  });
}

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

TEST(DdpBuffers, RankZerosGoToAllBeforeASynchronisedForward) {
  run_ranks(3, [](const Communicator& comm) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(2), torch::nn::Linear(2, 1));
    struct Holder : torch::nn::Module {
      explicit Holder(torch::nn::Sequential layers) : net(register_module("net", layers)) {}
      torch::Tensor forward(const torch::Tensor& x) { return net->forward(x); }
      torch::nn::Sequential net;
    };
    const auto holder = std::make_shared<Holder>(net);
    DistributedDataParallel<Holder> ddp(holder, comm);
    const auto mean = [&] {
      return holder->named_buffers()["net.0.running_mean"][0].item<float>();
    };
    const auto x = torch::full({4, 2}, static_cast<float>(10 * (comm.rank() + 1)));
    ddp(x).sum().backward();
    EXPECT_FLOAT_EQ(mean(), 1.0F * static_cast<float>(comm.rank() + 1));  // each rank's own
    ddp(x).sum().backward();  // starts from rank 0's mean, 1
    EXPECT_FLOAT_EQ(mean(), 0.9F + static_cast<float>(comm.rank() + 1));
    holder->eval();
    const torch::NoGradGuard no_grad;
    if (comm.rank() == 1) ddp(x);  // not collective
    EXPECT_FLOAT_EQ(mean(), 0.9F + static_cast<float>(comm.rank() + 1));
  });
}

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

TEST(DdpHook, CompressionKeepsTheMeanWithinItsPrecision) {
  for (const auto dtype : {torch::kBFloat16, torch::kFloat16}) {
    run_ranks(2, [&](const Communicator& comm) {
      TwoLayers net;
      TwoLayers same;
      DistributedDataParallel plain(same, comm);
      DistributedDataParallel ddp(
          net, comm,
          {.first_bucket_bytes = 1, .bucket_cap_bytes = 64, .hook = compress_gradients(dtype)});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        same->zero_grad();
        const auto x = rows(4, 6, step + comm.rank());
        ddp(x).sum().backward();
        plain(x).sum().backward();
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), same->parameters()[i].grad(),
                                      1e-2, 1e-2));
        }
      }
      EXPECT_FALSE(torch::equal(net->parameters()[0].grad(), same->parameters()[0].grad()));
    });
  }
  expect_error(Code::kUsage, {"float32"}, [] { compress_gradients(torch::kFloat32); });
}

TEST(DdpHook, AUsersHookSeesWholeBucketsByName) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    std::vector<std::string> names;
    struct Doubled : BucketWork {
      bool advance() override { return true; }
      void wait() override {}
    };
    DistributedDataParallel ddp(
        net, comm, {.hook = [&](const Communicator&, const GradientBucket& bucket, double) {
          names = bucket.parameters;
          bucket.gradients.mul_(2);
          return std::make_unique<Doubled>();
        }});
    ddp(value(3)).sum().backward();
    EXPECT_EQ(names, std::vector<std::string>{"weight"});
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 6.0F);
  });
}

TEST(DdpModel, DifferentModelsAreRefusedOnEveryRank) {
  const auto outcomes = outcomes_of_ranks(3, [](const Communicator& comm) {
    torch::nn::Linear net(4, comm.rank() == 1 ? 5 : 3);
    DistributedDataParallel ddp(net, comm);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kReplicasDiffer) << outcome.text();
    for (const char* part : {"weight", "[3, 4]", "[5, 4]", "rank 1"}) {
      EXPECT_NE(outcome.text().find(part), std::string::npos) << outcome.text();
    }
  }
}

TEST(DdpModel, ADriftedReplicaIsFound) {
  const auto outcomes = outcomes_of_ranks(3, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.check_replicas_every = 2});
    for (int step = 0; step < 4; ++step) {
      ddp(rows(4, 6, step)).sum().backward();
      if (comm.rank() == 2 && step == 1) {
        const torch::NoGradGuard no_grad;
        net->second->bias.add_(1e-6);
      }
    }
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), Code::kReplicasDiffer) << outcome.text();
    EXPECT_NE(outcome.text().find("second.bias"), std::string::npos) << outcome.text();
    EXPECT_NE(outcome.text().find("rank 2"), std::string::npos) << outcome.text();
  }
}

TEST(DdpModel, AModuleWithNothingToTrainIsRefused) {
  torch::nn::ReLU nothing;
  expect_error(Code::kUsage, {"no parameter"},
               [&] { DistributedDataParallel ddp(nothing, Communicator::self()); });
}

TEST(Ddp, AnExceptionOnOneRankReachesTheOthersByName) {
  const auto outcomes = outcomes_of_ranks(3, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 4; ++step) {
      if (comm.rank() == 1 && step == 2) throw std::runtime_error("bad row in file 7");
      ddp(rows(4, 6, step)).sum().backward();
    }
  });
  EXPECT_NE(outcomes[1].text().find("bad row"), std::string::npos);
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    EXPECT_EQ(outcomes[rank].code(), Code::kRankFailed) << outcomes[rank].text();
    EXPECT_NE(outcomes[rank].text().find("rank 1"), std::string::npos) << outcomes[rank].text();
  }
}

TEST(Ddp, SparseGradientsAndSecondDerivativesAreRefused) {
  const auto sparse = outcomes_of_ranks(2, [](const Communicator& comm) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel ddp(net, comm);
    ddp(torch::zeros({2}, torch::kInt64)).sum().backward();
  });
  for (const auto& outcome : sparse) EXPECT_TRUE(outcome.failed());
  EXPECT_NE(sparse[0].text().find("sparse"), std::string::npos) << sparse[0].text();
  const auto second = outcomes_of_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    ddp(value(1)).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  });
  for (const auto& outcome : second) EXPECT_TRUE(outcome.failed());
}

}  // namespace
}  // namespace lockstep::test
