// DistributedDataParallel: models that differ between ranks, change after they were wrapped, or
// have parameters of unusual layouts.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
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

TEST(DdpModel, AModuleWithNothingToTrainIsRefused) {
  torch::nn::ReLU nothing;
  expect_error(Code::kUsage, {"no parameter"},
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
      net->second->to(torch::kFloat32);  // autograd has forgotten who listens to these
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

}  // namespace
}  // namespace lockstep::test
