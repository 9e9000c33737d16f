// DistributedDataParallel where programs leave the usual path: models that change after they were
// wrapped, several forwards, nested backwards, evaluation between steps, shared hooks.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/mesh.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

torch::Tensor value(double number) {
  return torch::full({1}, static_cast<float>(number));
}

void expect_all_fail(const std::vector<RankOutcome>& outcomes, Code code,
                     const std::vector<std::string>& parts) {
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.code(), code) << outcome.text();
    for (const auto& part : parts) {
      EXPECT_NE(outcome.text().find(part), std::string::npos) << part << " in " << outcome.text();
    }
  }
}

TEST(DdpChangedModel, AParameterThatWasConvertedIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    ddp(rows(4, 6, comm.rank())).sum().backward();
    net->zero_grad(true);
    net->second->to(torch::kFloat64);
    net->second->to(torch::kFloat32);  // autograd has forgotten who listens to these
    ddp(rows(4, 6, comm.rank())).sum().backward();
  });
  expect_all_fail(outcomes, Code::kSyncMisuse, {"second.weight"});
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

// Computes its body again in backward, as activation checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Body = std::function<torch::Tensor(const torch::Tensor&)>;
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& /*makes it differentiable*/, Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    const torch::NoGradGuard no_grad;
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* body = reinterpret_cast<Body*>(context->saved_data["body"].toInt());
    const torch::AutoGradMode grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({(*body)(x)}, {gradients[0]});
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
};

TEST(DdpNested, LayersThatAreComputedAgainInBackwardAreAveraged) {
  struct Checkpointed : torch::nn::Module {
    Checkpointed() { inner = register_module("inner", TwoLayers()); }
    torch::Tensor forward(const torch::Tensor& x) {
      const auto on = torch::zeros({1}).requires_grad_();
      const auto middle = Recomputed::apply(x, on, &first);
      return Recomputed::apply(middle, on, &second);
    }
    TwoLayers inner{nullptr};
    Recomputed::Body first = [this](const torch::Tensor& x) { return inner->first(x).tanh(); };
    Recomputed::Body second = [this](const torch::Tensor& x) { return inner->second(x); };
  };
  for (const bool static_graph : {false, true}) {
    run_ranks(2, [&](const Communicator& comm) {
      TwoLayers alone;
      ((alone(rows(4, 6, 0)).sum() + alone(rows(4, 6, 1)).sum()) / 2).backward();
      const auto net = std::make_shared<Checkpointed>();
      DistributedDataParallel<Checkpointed> ddp(
          net, comm,
          {.first_bucket_bytes = 1, .bucket_cap_bytes = 1, .static_graph = static_graph});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad(true);
        ddp(rows(4, 6, comm.rank())).sum().backward();
        expect_close(net->inner->first->weight.grad(), alone->first->weight.grad(), "first");
        expect_close(net->inner->second->bias.grad(), alone->second->bias.grad(), "second");
      }
    });
  }
}

TEST(DdpNested, AGradientPenaltyMayDifferentiateTheOutputFirst) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    TwoLayers alone;
    DistributedDataParallel ddp(net, comm);
    const auto loss = [](const torch::Tensor& x, const torch::Tensor& out) {
      const auto slope = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
      return out.pow(2).mean() + slope.pow(2).sum();
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      alone->zero_grad();
      const auto x = rows(4, 6, comm.rank()).requires_grad_();
      loss(x, ddp(x)).backward();
      for (int rank = 0; rank < 2; ++rank) {
        const auto part = rows(4, 6, rank).requires_grad_();
        (loss(part, alone(part)) / 2).backward();
      }
      expect_close(net->first->weight.grad(), alone->first->weight.grad(), "first.weight");
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

TEST(DdpEvaluation, OneRankMayEvaluateAloneAfterAnyStep) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      ddp(rows(4, 6, comm.rank())).sum().backward();
      net->eval();
      if (comm.rank() == 0) ddp(rows(4, 6, 9));  // gradients on, as programs forget to say
      comm.barrier();
      net->train();
    }
    EXPECT_EQ(ddp.stats().synchronised_backwards, 3);
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

TEST(DdpHook, OneCompressionServesTwoModelsInOneBackward) {
  run_ranks(2, [](const Communicator& comm) {
    Scale a;
    Scale b;
    const DdpOptions options{.hook = compress_gradients(torch::kBFloat16)};
    DistributedDataParallel first(a, comm, options);
    DistributedDataParallel second(b, comm, options);
    for (int step = 0; step < 3; ++step) {
      a->zero_grad();
      b->zero_grad();
      const double mine = 1.0 + comm.rank();
      (first(value(mine)) + second(value(10 * mine))).sum().backward();
      EXPECT_FLOAT_EQ(a->weight.grad().item<float>(), 1.5F);
      EXPECT_FLOAT_EQ(b->weight.grad().item<float>(), 15.0F);
    }
  });
}

TEST(DdpHook, AHookThatGivesNoWorkIsRefused) {
  const auto outcomes = outcomes_of_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm,
                                {.hook = [](const Communicator&, const GradientBucket&, double) {
                                  return std::unique_ptr<BucketWork>();
                                }});
    ddp(value(1)).sum().backward();
  });
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.failed());
}

TEST(DdpHook, GapsBetweenGradientsAreZeroAfterTheNewOrder) {
  run_ranks(2, [](const Communicator& comm) {
    struct Backwards : torch::nn::Module {
      Backwards() {
        a = register_parameter("a", torch::ones({1}));
        b = register_parameter("b", torch::ones({40}));
      }
      torch::Tensor forward(const torch::Tensor& x) { return (x * b).sum() * a; }
      torch::Tensor a, b;
    };
    const auto net = std::make_shared<Backwards>();
    DistributedDataParallel<Backwards> ddp(net, comm);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad(true);
      ddp(torch::ones({40})).sum().backward();
      const double grads = net->a.grad().sum().item<double>() + net->b.grad().sum().item<double>();
      EXPECT_EQ(ddp.buckets()[0].gradients.sum().item<double>(), grads);
    }
  });
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

TEST(DdpNoSync, ABackwardThatFailsInsideMayBeRepeated) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    {
      const NoSync no_sync(ddp);
      auto before = value(1).requires_grad_();
      auto grown = before * 1;
      grown.register_hook(
          [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("out of memory"); });
      // The parameter's gradient is there when the rest of backward fails.
      EXPECT_THROW(ddp(grown).sum().backward(), std::exception);
    }
    net->zero_grad(true);
    ddp(value(1.0 + comm.rank())).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.5F);
  });
}

TEST(DdpLifetime, GradientsAndGraphsMayOutliveWrapperAndCommunicator) {
  std::vector<torch::Tensor> kept(2);
  std::vector<torch::Tensor> losses(2);
  std::vector<Scale> nets;
  for (int rank = 0; rank < 2; ++rank) nets.emplace_back();
  run_ranks(2, [&](const Communicator& comm) {
    const auto mine = static_cast<size_t>(comm.rank());
    DistributedDataParallel ddp(nets[mine], comm);
    ddp(value(1.0 + comm.rank())).sum().backward();
    kept[mine] = nets[mine]->weight.grad();
    losses[mine] = ddp(value(5)).sum();
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_FLOAT_EQ(kept[rank].item<float>(), 1.5F);
    losses[rank].backward();
    EXPECT_FLOAT_EQ(nets[rank]->weight.grad().item<float>(), 6.5F);
  }
}

TEST(DdpThreads, BackwardMayRunInAnotherThreadThanForward) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      const auto loss = ddp(value(1.0 + comm.rank())).sum();
      std::thread([&] { loss.backward(); }).join();
      EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.5F);
    }
  });
}

}  // namespace
}  // namespace lockstep::test
