// DistributedDataParallel: models that differ between ranks, change after they were wrapped, have
// parameters of unusual layouts or parameters that a step does not use.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::ddp_model_test {
namespace {

void expect_all_fail(const std::vector<RankOutcome>& outcomes, Code code,
                     const std::vector<std::string>& parts) {
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), code) << outcome.text();
    for (const auto& part : parts) {
      EXPECT_NE(outcome.text().find(part), std::string::npos) << part << " in " << outcome.text();
    }
  }
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

struct RotatedImpl : torch::nn::Module {
  explicit RotatedImpl(double angle)
      : layer(register_module("layer", torch::nn::Linear(4, 4))),
        angles(register_buffer("angles", torch::polar(torch::ones({2}), torch::full({2}, angle)))) {
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto pairs = torch::view_as_complex(layer(x).view({-1, 2, 2}));
    return torch::view_as_real(pairs * angles).flatten(1);
  }
  torch::nn::Linear layer;
  torch::Tensor angles;
};
TORCH_MODULE(Rotated);

// As rotary embeddings have them.
TEST(DdpModel, BuffersMayBeComplex) {
  const torch::Tensor first = Rotated(0.5)->angles;
  run_ranks(2, [&](const Communicator& comm) {
    Rotated net(0.5 + comm.rank());
    DistributedDataParallel ddp(net, comm);
    EXPECT_TRUE(torch::equal(net->angles, first));
    ddp(rows(4, 4, comm.rank())).square().sum().backward();
    expect_same_on_all(comm, net->layer->weight.grad(), "gradient");
    Rotated divided(0.5 + comm.rank());
    FullyShardedDataParallel fsdp(divided, comm);
    EXPECT_TRUE(torch::equal(divided->angles, first));
  });
}

TEST(DdpModel, AModuleWithNothingToTrainIsRefused) {
  torch::nn::ReLU nothing;
  expect_error(Code::kUsage, {"no trained parameter"},
               [&] { DistributedDataParallel ddp(nothing, Communicator::self()); });
}

TEST(DdpChangedModel, AParameterThatWasConvertedIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    ddp(rows(4, 6, comm.rank())).sum().backward();
    net->zero_grad(true);
    net->second->to(torch::kFloat64);
    ddp(rows(4, 6, comm.rank()));
  });
  expect_all_fail(outcomes, Code::kSyncMisuse, {"second.weight"});
}

TEST(DdpChangedModel, AParameterThatWasConvertedBackIsAveragedAsBefore) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    std::vector<torch::Tensor> gradients;
    for (int step = 0; step < 2; ++step) {
      net->zero_grad(true);
      ddp(rows(4, 6, comm.rank())).sum().backward();
      gradients.push_back(net->second->weight.grad().clone());
      net->second->to(torch::kFloat64);
      net->second->to(torch::kFloat32);  // autograd has lost the hooks of these
    }
    EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
  });
}

TEST(DdpChangedModel, AParameterThatWasResizedIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    ddp(value(1)).sum().backward();
    net->zero_grad(true);
    net->weight.set_data(torch::ones({64}));
    ddp(value(1)).sum().backward();
  });
  expect_all_fail(outcomes, Code::kSyncMisuse, {"weight", "[1]", "[64]"});
}

TEST(DdpChangedModel, FreezingOrUnfreezingAParameterIsRefusedByName) {
  for (const bool freeze : {true, false}) {
    const auto outcomes = outcomes_of_ranks(2, [&](const Communicator& comm) {
      TwoLayers net;
      net->first->bias.requires_grad_(freeze);
      DistributedDataParallel ddp(net, comm);
      ddp(rows(4, 6, comm.rank())).sum().backward();
      net->zero_grad(true);
      net->first->bias.requires_grad_(!freeze);
      ddp(rows(4, 6, comm.rank())).sum().backward();
    });
    for (const auto& outcome : outcomes) {
      EXPECT_TRUE(outcome.failed());
      EXPECT_NE(outcome.text().find(freeze ? "no gradient" : "made trainable"), std::string::npos)
          << outcome.text();
      EXPECT_NE(outcome.text().find("first.bias"), std::string::npos) << outcome.text();
    }
  }
}

TEST(DdpChangedModel, AModelMayBeFrozenAsAWholeForAWhile) {
  run_ranks(2, [](const Communicator& comm) {
    Scale judge;
    Scale maker;
    DistributedDataParallel judging(judge, comm);
    DistributedDataParallel making(maker, comm);
    for (int step = 0; step < 3; ++step) {
      judge->zero_grad(true);
      maker->zero_grad(true);
      const double mine = 1.0 + comm.rank();
      judging(value(mine)).sum().backward();
      judge->weight.requires_grad_(false);
      judging(making(value(10 * mine))).sum().backward();
      judge->weight.requires_grad_(true);
      EXPECT_FLOAT_EQ(judge->weight.grad().item<float>(), 1.5F);
      EXPECT_FLOAT_EQ(maker->weight.grad().item<float>(), 15.0F);
    }
  });
}

TEST(DdpChangedModel, AParameterThatAppearsInTheFirstForwardIsRefusedByName) {
  struct Late : torch::nn::Module {
    Late() { weight = register_parameter("weight", torch::ones({1})); }
    torch::Tensor forward(const torch::Tensor& x) {
      if (!late.defined()) late = register_parameter("late", torch::ones({1}));
      return x * weight * late;
    }
    torch::Tensor weight, late;
  };
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    DistributedDataParallel<Late> ddp(std::make_shared<Late>(), comm);
    ddp(value(1)).sum().backward();
    ddp(value(1)).sum().backward();
  });
  expect_all_fail(outcomes, Code::kSyncMisuse, {"late"});
}

TEST(DdpChangedModel, LayoutsThatDifferBetweenRanksAreRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 2, 3).bias(false));
    if (comm.rank() == 1) {
      net->weight.set_data(net->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    }
    DistributedDataParallel ddp(net, comm);
    ddp(torch::ones({1, 3, 4, 4})).sum().backward();
  });
  expect_all_fail(outcomes, Code::kReplicasDiffer, {"weight", "rank 1"});
}

TEST(DdpChangedModel, ADifferenceOnAMeshAxisNamesRanksOfTheWorld) {
  const auto outcomes = outcomes_of_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {{"dp", 2}, {"pp", 2}});
    torch::nn::Linear net(world.rank() == 3 ? 5 : 4, 2);
    DistributedDataParallel ddp(net, mesh.axis("dp"));
    ddp(torch::ones({1, 4})).sum().backward();
  });
  EXPECT_FALSE(outcomes[0].failed()) << outcomes[0].text();
  EXPECT_FALSE(outcomes[2].failed()) << outcomes[2].text();
  expect_all_fail({outcomes[1], outcomes[3]}, Code::kReplicasDiffer, {"rank 1 has", "rank 3 has"});
}

TEST(DdpLayout, ChannelsLastEmptyAndScalarParametersTrain) {
  struct Odd : torch::nn::Module {
    Odd() {
      filter = register_parameter(
          "filter",
          torch::arange(24.0F).view({2, 3, 2, 2}).contiguous(torch::MemoryFormat::ChannelsLast));
      empty = register_parameter("empty", torch::empty({0, 3}));
      scalar = register_parameter("scalar", torch::tensor(2.0F));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return torch::conv2d(x, filter).sum() * scalar + empty.sum();
    }
    torch::Tensor filter, empty, scalar;
  };
  run_ranks(2, [](const Communicator& comm) {
    for (const int64_t cap : {int64_t{0}, int64_t{1} << 20}) {
      const auto input = [](int rank) { return rows(27, 1, rank).view({1, 3, 3, 3}); };
      Odd alone;
      ((alone.forward(input(0)) + alone.forward(input(1))) / 2).backward();
      const auto net = std::make_shared<Odd>();
      DistributedDataParallel<Odd> ddp(net, comm,
                                       {.first_bucket_bytes = cap, .bucket_cap_bytes = cap});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad(/*set_to_none=*/step % 2 == 0);
        ddp(input(comm.rank())).backward();
        expect_close(net->filter.grad(), alone.filter.grad(), "filter");
        expect_close(net->scalar.grad(), alone.scalar.grad(), "scalar");
        EXPECT_EQ(net->filter.grad().strides(), net->filter.strides());
        EXPECT_EQ(net->empty.grad().sizes(), net->empty.sizes());
      }
    }
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
}  // namespace lockstep::test::ddp_model_test
