// DistributedDataParallel: accumulation, nested backwards, evaluation between steps, failures, and
// ranks that have more steps than others.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::ddp_steps_test {
namespace {

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

// Nobody can know before backward that its gradient is sparse.
struct LookupByHandImpl : torch::nn::Module {
  LookupByHandImpl() : table(register_parameter("table", torch::ones({4, 2}))) {}
  torch::Tensor forward(const torch::Tensor& words) {
    return torch::embedding(table, words, -1, false, /*sparse=*/true);
  }
  torch::Tensor table;
};
TORCH_MODULE(LookupByHand);

TEST(Ddp, UnexpectedSparseGradientsAndSecondDerivativesAreRefused) {
  const auto sparse = outcomes_of_ranks(2, [](const Communicator& comm) {
    LookupByHand net;
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

// Recomputes its body in backward, as activation checkpointing does.
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

TEST(DdpEvaluation, OneRankMayEvaluateAloneAfterAnyStep) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      ddp(rows(4, 6, comm.rank())).sum().backward();
      net->eval();
      if (comm.rank() == 0) ddp(rows(4, 6, 9));  // with gradients enabled, as in many programs
      comm.barrier();
      net->train();
    }
    EXPECT_EQ(ddp.stats().synchronised_backwards, 3);
  });
}

// Buffers go to all ranks before a step's first forward; an evaluation is none.
TEST(DdpEvaluation, OneRankMayEvaluateAloneBesideBuffers) {
  run_ranks(2, [](const Communicator& comm) {
    torch::nn::Sequential net(torch::nn::Linear(6, 3), torch::nn::BatchNorm1d(3));
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(true);
      ddp(rows(4, 6, comm.rank())).square().sum().backward();
      net->eval();
      if (comm.rank() == step % 2) ddp(rows(4, 6, 9));  // with gradients enabled
      net->train();
    }
    EXPECT_EQ(ddp.stats().synchronised_backwards, 3);
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
      // The parameter already has its gradient when the rest of backward fails.
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

// With gradients enabled, the other ranks would take an evaluation for a step.
TEST(DdpJoin, EvaluatesWithoutGradients) {
  const auto outcomes = [](bool with_gradients) {
    return outcomes_of_ranks(2, [=](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm);
      join(ddp, [&] {
        for (int step = 0; step < 3; ++step) {
          ddp(rows(4, 6, step)).sum().backward();
          if (comm.rank() == 1 || step != 1) continue;
          net->eval();
          const torch::AutoGradMode mode(with_gradients);
          ddp(rows(4, 6, 9));
          net->train();
        }
      });
    });
  };
  for (const auto& each : outcomes(false)) EXPECT_FALSE(each.failed()) << each.text();
  for (const auto& each : outcomes(true)) {
    EXPECT_EQ(each.code(), Code::kSyncMisuse);
    EXPECT_NE(each.text().find("rank 0 called forward in eval mode and rank 1 in training mode"),
              std::string::npos)
        << each.text();
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

// The weights that a join ends with are the same on all ranks, and what else decides an update is
// not: momentum, or a scaler that has seen fewer steps.
TEST(DdpJoin, AnOptimizerOrScalerThatIsBehindIsNoticed) {
  enum Behind { kNothing, kMomentum, kScaler };
  for (const Behind behind : {kNothing, kMomentum, kScaler}) {
    for (const bool joins_again : {true, false}) {
      const auto outcomes = outcomes_of_ranks(3, [&](const Communicator& comm) {
        TwoLayers net;
        DistributedDataParallel ddp(net, comm, {.broadcast_buffers = false});
        Sgd optimizer(ddp.parameters(), {.lr = 0.1, .momentum = behind == kMomentum ? 0.9 : 0});
        GradScaler scaler({.init_scale = 64, .growth_interval = 3, .enabled = behind == kScaler});
        const auto train = [&](int steps) {
          for (int step = 0; step < steps; ++step) {
            scaler.scale(ddp(rows(4, 6, step + comm.rank())).square().mean()).backward();
            scaler.step(optimizer, {.zero_grad = true});
            scaler.update();
          }
        };
        join(ddp, [&] { train(2 + comm.rank()); });
        joins_again ? join(ddp, [&] { train(6 + comm.rank()); }) : train(6);
      });
      for (const auto& outcome : outcomes) {
        EXPECT_EQ(outcome.failed(), behind != kNothing) << behind << ": " << outcome.text();
        if (!outcome.failed()) continue;
        EXPECT_EQ(outcome.code(), Code::kReplicasDiffer) << outcome.text();
        EXPECT_NE(outcome.text().find("join"), std::string::npos) << outcome.text();
      }
    }
  }
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
}  // namespace lockstep::test::ddp_steps_test
