// DistributedDataParallel: hooks in place of a bucket's all-reduce.

#include "ddp_nets.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "rank_threads.hpp"

namespace lockstep::test {
namespace {

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

}  // namespace
}  // namespace lockstep::test
