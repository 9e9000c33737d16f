// DistributedDataParallel: parity with one process, gradients in buckets, hooks.

#include "lockstep/distributed_data_parallel.hpp"

#include "ddp_nets.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::ddp_test {
namespace {

constexpr int64_t kRows = 60;
constexpr int kSteps = 4;

std::vector<torch::Tensor> weights_of(const torch::nn::Module& net) {
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : net.parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

std::vector<torch::Tensor> train_alone() {
  TwoLayers net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(net(rows(kRows, 6, step)), rows(kRows, 3, step + 0.5)).backward();
    optimizer.step();
  }
  return weights_of(*net);
}

// Rank r takes the r-th block of rows; `shares` gives the blocks' sizes.
std::vector<torch::Tensor> train_rank(const Communicator& comm, const std::vector<int64_t>& shares,
                                      const DdpOptions& options, bool set_to_none = true) {
  TwoLayers net;
  if (comm.rank() != 0) {  // rank 0's weights must reach the others
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.zero_();
  }
  DistributedDataParallel ddp(net, comm, options);
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  const auto mine = static_cast<size_t>(comm.rank());
  ddp.set_weight(static_cast<double>(shares[mine]));
  int64_t begin = 0;
  for (size_t i = 0; i < mine; ++i) begin += shares[i];
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad(set_to_none);
    const auto x = rows(kRows, 6, step).narrow(0, begin, shares[mine]);
    const auto y = rows(kRows, 3, step + 0.5).narrow(0, begin, shares[mine]);
    torch::mse_loss(ddp(x), y).backward();
    optimizer.step();
  }
  return weights_of(*net);
}

void expect_parity(const std::vector<int64_t>& shares, const DdpOptions& options,
                   bool set_to_none = true) {
  const auto expected = train_alone();
  run_ranks(static_cast<int>(shares.size()), [&](const Communicator& comm) {
    const auto weights = train_rank(comm, shares, options, set_to_none);
    for (size_t i = 0; i < expected.size(); ++i) {
      expect_close(weights[i], expected[i], "parameter " + std::to_string(i));
    }
  });
}

TEST(Ddp, RanksOnPartsEqualOneOnAll) {
  for (const int ranks : {1, 2, 3, 5}) {
    expect_parity(std::vector<int64_t>(static_cast<size_t>(ranks), kRows / ranks), {});
  }
}

TEST(Ddp, TinyBucketsChangeNothing) {
  for (const int ranks : {2, 3}) {
    expect_parity(std::vector<int64_t>(static_cast<size_t>(ranks), kRows / ranks),
                  {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
  }
}

TEST(Ddp, UnevenRowsAreWeighed) {
  expect_parity({37, 23}, {});
  expect_parity({40, 1, 19}, {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
}

TEST(Ddp, ZeroedGradientsServeAsWellAsDroppedOnes) {
  expect_parity({30, 30}, {}, /*set_to_none=*/false);
}

TEST(Ddp, TheSameRunTwiceIsBitwiseEqual) {
  const DdpOptions options{.first_bucket_bytes = 1, .bucket_cap_bytes = 64};
  std::vector<std::vector<torch::Tensor>> runs(2);
  for (auto& run : runs) {
    run_ranks(3, [&](const Communicator& comm) {
      auto weights = train_rank(comm, {20, 20, 20}, options);
      if (comm.rank() == 2) run = std::move(weights);
    });
  }
  for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(torch::equal(runs[0][i], runs[1][i]));
}

TEST(Ddp, GradientsAreViewsOfTheBuckets) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      torch::mse_loss(ddp(rows(4, 6, step)), rows(4, 3, step)).backward();
      const auto buckets = ddp.buckets();
      EXPECT_EQ(buckets.size(), 3);
      for (const auto& item : net->named_parameters()) {
        bool found = false;
        const auto* place = static_cast<const char*>(item.value().grad().data_ptr());
        for (const auto& bucket : buckets) {
          const auto* begin = static_cast<const char*>(bucket.gradients.data_ptr());
          found |= place >= begin && place < begin + bucket.gradients.nbytes();
        }
        EXPECT_TRUE(found) << item.key();
      }
    }
  });
}

TEST(Ddp, AGradFromElsewhereIsTakenIn) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    DistributedDataParallel ddp(net, comm);
    net->weight.mutable_grad() = torch::full({1}, 10.0F);
    ddp(torch::full({1}, 1.0F + static_cast<float>(comm.rank()))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 11.5F);
    EXPECT_EQ(net->weight.grad().data_ptr(), ddp.buckets()[0].gradients.data_ptr());
  });
}

TEST(Ddp, BucketsFollowTheOrderOfReadinessFromTheSecondStep) {
  // Forward uses the parameters in reverse order of their registration.
  struct Backwards : torch::nn::Module {
    Backwards() {
      a = register_parameter("a", torch::ones({4}));
      b = register_parameter("b", torch::ones({4}));
    }
    torch::Tensor forward(const torch::Tensor& x) { return (x * b).tanh() * a; }
    torch::Tensor a, b;
  };
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<Backwards>();
    DistributedDataParallel<Backwards> ddp(net, comm,
                                           {.first_bucket_bytes = 1, .bucket_cap_bytes = 1});
    EXPECT_EQ(ddp.buckets()[0].parameters, std::vector<std::string>{"b"});
    std::vector<torch::Tensor> gradients;
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      ddp(torch::ones({4})).sum().backward();
      gradients.push_back(net->a.grad().clone());
    }
    EXPECT_EQ(ddp.buckets()[0].parameters, std::vector<std::string>{"a"});
    EXPECT_TRUE(torch::equal(gradients[0], gradients[1]));
  });
}

TEST(Ddp, AccumulatedGradientsSurviveTheNewOrder) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
    const auto x = rows(4, 6, comm.rank());
    ddp(x).sum().backward();
    const auto once = net->first->weight.grad().clone();
    ddp(x).sum().backward();  // no zero_grad: adds to the mean, and averages again
    expect_close(net->first->weight.grad(), once * 2, "sum of two steps");
  });
}

TEST(Ddp, StatsCountBucketsAndBytes) {
  run_ranks(2, [](const Communicator& comm) {
    TwoLayers net;
    DistributedDataParallel ddp(net, comm, {.first_bucket_bytes = 1, .bucket_cap_bytes = 64});
    for (int step = 0; step < 3; ++step) ddp(rows(4, 6, step)).sum().backward();
    const auto stats = ddp.stats();
    EXPECT_EQ(stats.synchronised_backwards, 3);
    EXPECT_EQ(stats.all_reduces, 9);
    int64_t bytes = 0;
    for (const auto& bucket : ddp.buckets()) {
      bytes += static_cast<int64_t>(bucket.gradients.nbytes());
    }
    EXPECT_EQ(stats.bytes, 3 * bytes);
    ASSERT_EQ(stats.last_step.size(), 3);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(stats.last_step[i].index, static_cast<int64_t>(i));
      EXPECT_LE(stats.backward_started_ns, stats.last_step[i].launched_ns);
      EXPECT_LE(stats.last_step[i].launched_ns, stats.last_step[i].finished_ns);
    }
    EXPECT_GE(stats.communication_ns, 0);
  });
}

TEST(Ddp, OneRankNeedsNoBuckets) {
  Scale net;
  DistributedDataParallel ddp(net, Communicator::self());
  ddp(torch::full({1}, 3.0F)).sum().backward();
  EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 3.0F);
  EXPECT_TRUE(ddp.buckets().empty());
  EXPECT_EQ(ddp.stats().all_reduces, 0);
  EXPECT_EQ(ddp.stats().synchronised_backwards, 1);
}

TEST(Ddp, FrozenAndSharedParametersAreLeftOutAndTakenOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      weight = register_parameter("weight", torch::ones({2}));
      frozen = register_parameter("frozen", torch::ones({2}), /*requires_grad=*/false);
      inner = register_module("inner", std::make_shared<torch::nn::Module>());
      inner->register_parameter("alias", weight);
    }
    torch::Tensor forward(const torch::Tensor& x) { return x * weight * weight * frozen; }
    torch::Tensor weight, frozen;
    std::shared_ptr<torch::nn::Module> inner;
  };
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<Tied>();
    DistributedDataParallel<Tied> ddp(net, comm);
    ddp(torch::full({2}, 1.0F + static_cast<float>(comm.rank()))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad()[0].item<float>(), 3.0F);  // mean of 2 and 4
    EXPECT_FALSE(net->frozen.grad().defined());
  });
}

TEST(Ddp, AModuleIsFreeAgainAfterItsWrapperIsGone) {
  run_ranks(2, [](const Communicator& comm) {
    Scale net;
    { DistributedDataParallel ddp(net, comm); }
    net(torch::full({1}, 1.0F + static_cast<float>(comm.rank()))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.0F + static_cast<float>(comm.rank()));
    DistributedDataParallel again(net, comm);
    net->zero_grad();
    again(torch::full({1}, 1.0F + static_cast<float>(comm.rank()))).sum().backward();
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 1.5F);
  });
}

TEST(Ddp, HalfPrecisionParametersHaveBucketsOfTheirOwn) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      wide = register_parameter("wide", torch::ones({3}));
      narrow = register_parameter("narrow", torch::ones({3}, torch::kBFloat16));
    }
    torch::Tensor forward(const torch::Tensor& x) { return x * wide * narrow.to(torch::kFloat32); }
    torch::Tensor wide, narrow;
  };
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<Mixed>();
    DistributedDataParallel<Mixed> ddp(net, comm);
    ddp(torch::full({3}, 2.0F + 4.0F * static_cast<float>(comm.rank()))).sum().backward();
    EXPECT_EQ(ddp.buckets().size(), 2);
    EXPECT_FLOAT_EQ(net->wide.grad()[2].item<float>(), 4.0F);
    EXPECT_FLOAT_EQ(net->narrow.grad()[2].item<float>(), 4.0F);
  });
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
    DistributedDataParallel ddp(
        net, comm, {.hook = [&](const Communicator&, const GradientBucket& bucket, double) {
          names = bucket.parameters;
          bucket.gradients.mul_(2);
          return Work();  // done
        }});
    ddp(value(3)).sum().backward();
    EXPECT_EQ(names, std::vector<std::string>{"weight"});
    EXPECT_FLOAT_EQ(net->weight.grad().item<float>(), 6.0F);
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

// Its ranks are threads, which allocate and look up compressed buckets at the same time.
TEST(DdpHook, OneCompressionServesAllRanksOfAProcess) {
  const auto hook = compress_gradients(torch::kBFloat16);
  for (int round = 0; round < 20; ++round) {
    run_ranks(4, [&](const Communicator& comm) {
      TwoLayers net;
      DistributedDataParallel ddp(net, comm,
                                  {.first_bucket_bytes = 1, .bucket_cap_bytes = 64, .hook = hook});
      for (int step = 0; step < 3; ++step) ddp(rows(4, 6, comm.rank())).sum().backward();
    });
  }
}

TEST(DdpHook, WhatFollowsACollectiveRunsOnceForEachBucket) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [](const Communicator& comm) {
      TwoLayers net;
      int halved = 0;
      DistributedDataParallel ddp(
          net, comm,
          {.first_bucket_bytes = 1,
           .bucket_cap_bytes = 64,
           .hook = [&](const Communicator& all, const GradientBucket& bucket, double weight) {
             return all.begin_all_reduce(bucket.gradients, ReduceOp::kMean, {.weight = weight})
                 .then([&halved, gradients = bucket.gradients] {
                   halved += 1;
                   gradients.div_(2);
                 });
           }});
      TwoLayers same;
      DistributedDataParallel plain(same, comm);
      ddp(rows(4, 6, comm.rank())).sum().backward();
      plain(rows(4, 6, comm.rank())).sum().backward();
      EXPECT_EQ(halved, static_cast<int>(ddp.buckets().size()));
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        expect_close(net->parameters()[i].grad() * 2, same->parameters()[i].grad(), "gradient");
      }
    });
  }
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

}  // namespace
}  // namespace lockstep::test::ddp_test
