// DataParallel in unusual graphs and programs: several forwards, hooks, sparse and strided
// gradients, buffers that forward changes, autocast, lifetimes, nesting.

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data_parallel.hpp"
#include "tensor_support.hpp"
#include "torch_compat.hpp"

namespace lockstep::test::data_parallel_graph_test {
namespace {

using test::expect_close;
using test::expect_error;

TEST(Graphs, TwoForwardsMayShareOneBackward) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(torch::kFloat64);  // so that no rounding can look like an error
  DataParallel parallel(net, devices);
  const auto a = torch::randn({6, 4}, torch::kFloat64);
  const auto b = torch::randn({4, 4}, torch::kFloat64);
  (parallel(a).pow(2).sum() + parallel(b).pow(2).sum()).backward();
  const auto both = net->parameters()[0].grad().clone();
  net->zero_grad(true);
  (net->forward(a).pow(2).sum() + net->forward(b).pow(2).sum()).backward();
  expect_close(both, net->parameters()[0].grad(), "gradient of both");
}

TEST(Graphs, HooksOnParametersRunOnceOnTheSum) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::Linear net(3, 2);
  DataParallel parallel(net, devices);
  int calls = 0;
  net->weight.register_hook([&](const torch::Tensor& gradient) {
    ++calls;
    return gradient * 10;
  });
  const auto x = torch::randn({4, 3});
  parallel(x).sum().backward();
  EXPECT_EQ(calls, 1);
  expect_close(net->weight.grad(), 10 * x.sum(0).expand({2, 3}), "hooked gradient");
}

TEST(Graphs, SparseGradientsAreSummed) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  DataParallel parallel(net, devices);
  const auto ids = torch::tensor({1, 2, 2, 7, 9, 1, 1});
  parallel(ids).sum().backward();
  ASSERT_TRUE(net->weight.grad().is_sparse());
  const auto expected =
      torch::bincount(ids, {}, 10).to(torch::kFloat32).unsqueeze(1).expand({10, 3});
  expect_close(net->weight.grad().to_dense(), expected, "counts");
}

// Gives its weight a gradient whose strides depend on the device.
struct StridedImpl : torch::nn::Cloneable<StridedImpl> {
  StridedImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({300, 200})); }
  torch::Tensor forward(const torch::Tensor& x) {
    if (current_device()->index() == 2) return torch::mm(x, weight.t().contiguous().t());
    return torch::mm(x, weight);
  }
  torch::Tensor weight;
};
TORCH_MODULE(Strided);

TEST(Graphs, GradientsOfDifferentStridesAreSummedWithoutARace) {
  const Devices devices("cpu:4");
  const UseDevice home(devices[0]);
  Strided net;
  DataParallel parallel(net, devices);
  const auto x = torch::randn({40, 300});
  const auto expected = x.sum(0).unsqueeze(1).expand({300, 200});
  for (int i = 0; i < 20; ++i) {
    net->zero_grad(true);
    parallel(x).sum().backward();
    ASSERT_TRUE(torch::allclose(net->weight.grad(), expected, 1e-4, 1e-4)) << "round " << i;
  }
}

// Counts its forwards in a buffer, beside a weight so large that copying it takes a while.
struct CountingImpl : torch::nn::Cloneable<CountingImpl> {
  CountingImpl() { reset(); }
  void reset() override {
    large = register_parameter("large", torch::ones({2'000'000}));
    count = register_buffer("count", torch::zeros({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto out = x + count;
    count.add_(1);
    return out;
  }
  torch::Tensor large, count;
};
TORCH_MODULE(Counting);

TEST(Graphs, AllReplicasStartFromTheSameBuffers) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Counting net;
  DataParallel parallel(net, devices);
  for (int step = 0; step < 10; ++step) {
    const auto out = parallel(torch::zeros({4, 1}));
    ASSERT_TRUE(torch::equal(out, torch::full({4, 1}, step))) << out;
  }
}

TEST(Graphs, WhatIsFrozenAfterForwardDoesNotChangeTheRecordedGraph) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::Linear net(3, 2);
  DataParallel parallel(net, devices);
  net->bias.set_requires_grad(false);
  const auto x = torch::randn({4, 3});
  const auto loss = parallel(x).sum();
  net->bias.set_requires_grad(true);
  net->weight.set_requires_grad(false);
  net->weight.set_requires_grad(true);
  loss.backward();
  expect_close(net->weight.grad(), x.sum(0).expand({2, 3}), "weight");
  EXPECT_FALSE(net->bias.grad().defined());
}

TEST(Graphs, AutocastOnWorkersSeesFreshWeights) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::Linear net(4, 4);
  DataParallel parallel(net, devices);
  const auto x = torch::ones({4, 2, 4});
  const auto predict = [&] {
    compat::enable_cpu_autocast(true);
    at::autocast::increment_nesting();
    const auto out = parallel(x);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    compat::enable_cpu_autocast(false);
    return out.detach().to(torch::kFloat32);
  };
  EXPECT_EQ(predict().scalar_type(), torch::kFloat32);
  {
    const torch::NoGradGuard no_grad;
    net->weight.fill_(1);
    net->bias.fill_(0);
  }
  EXPECT_TRUE(torch::equal(predict(), torch::full({4, 2, 4}, 4.0)));
}

TEST(Graphs, GraphsKeepTheirDevicesAlive) {
  torch::nn::Linear net(3, 2);
  const auto x = torch::randn({4, 3});
  const auto out = [&] {
    const Devices devices("cpu:2");
    DataParallel parallel(net, devices);
    return parallel(x);
  }();
  out.sum().backward();
  expect_close(net->weight.grad(), x.sum(0).expand({2, 3}), "gradient");
}

TEST(Graphs, ANetTrainedOnEarlierDevicesIsTaken) {
  torch::nn::Linear net{nullptr};
  {
    const Devices earlier("cpu:2");
    const UseDevice home(earlier[0]);
    net = torch::nn::Linear(3, 2);
  }
  const Devices devices("cpu:2");
  DataParallel parallel(net, devices);
  const auto x = torch::randn({4, 3});
  expect_close(parallel(x), net->forward(x), "output");
}

TEST(Graphs, UndefinedTensorsPassThrough) {
  struct MaybeImpl : torch::nn::Cloneable<MaybeImpl> {
    void reset() override {}
    torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask) {
      return mask.defined() ? x * mask : x + 1;
    }
  };
  const Devices devices("cpu:2");
  DataParallel<MaybeImpl> parallel(std::make_shared<MaybeImpl>(), devices);
  const auto x = torch::randn({4, 3});
  expect_close(parallel(x, torch::Tensor()), x + 1, "without");
  expect_close(parallel(x, torch::full({4, 1}, 2.0)), x * 2, "with");
}

TEST(Graphs, LeavesThatAreNeitherParametersNorArgumentsAreRefused) {
  struct OutsiderImpl : torch::nn::Cloneable<OutsiderImpl> {
    void reset() override {}
    torch::Tensor forward(const torch::Tensor& x) { return x * outside; }
    torch::Tensor outside = torch::ones({3}, torch::requires_grad());
  };
  const Devices devices("cpu:2");
  DataParallel<OutsiderImpl> parallel(std::make_shared<OutsiderImpl>(), devices);
  try {
    parallel(torch::ones({4, 3}));
    FAIL() << "its gradient would have been lost";
  } catch (const Error& error) {
    EXPECT_NE(error.block().find("neither a parameter nor an argument"), std::string::npos);
  }
}

struct BaseImpl : torch::nn::Cloneable<BaseImpl> {
  void reset() override {}
  virtual torch::Tensor forward(const torch::Tensor& x) { return x; }
};
struct DerivedImpl : BaseImpl {
  torch::Tensor forward(const torch::Tensor& x) override { return x * 2; }
};

TEST(Graphs, ACloneOfAnotherTypeIsRefused) {
  const Devices devices("cpu:2");
  expect_error(Code::kReplicate, {"the replica of"},
               [&] { DataParallel<BaseImpl> parallel(std::make_shared<DerivedImpl>(), devices); });
  DataParallel<BaseImpl> parallel(std::make_shared<DerivedImpl>(), devices,
                                  [] { return std::make_shared<DerivedImpl>(); });
  expect_close(parallel(torch::ones({4, 1})), torch::full({4, 1}, 2.0), "derived forward");
}

struct TemperedImpl : torch::nn::Cloneable<TemperedImpl> {
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) { return x * temperature; }
  double temperature = 1;
};

TEST(Graphs, PlainMembersAreChangedInEveryReplica) {
  const Devices devices("cpu:3");
  DataParallel<TemperedImpl> parallel(std::make_shared<TemperedImpl>(), devices);
  parallel.for_each_replica([](TemperedImpl& replica) { replica.temperature = 4; });
  expect_close(parallel(torch::ones({6, 1})), torch::full({6, 1}, 4.0), "tempered");
}

TEST(Graphs, OnAWorkerOfItsOwnDevicesItIsRefusedNotHung) {
  const Devices devices("cpu:2");
  torch::nn::Linear net(3, 2);
  DataParallel parallel(net, devices);
  expect_error(Code::kEngine, {"on the worker of cpu:1"}, [&] {
    devices[1].run("inside", [&] { parallel(torch::ones({4, 3})); });
  });
  const auto loss = parallel(torch::ones({4, 3})).sum();
  expect_error(Code::kEngine, {"on the worker of cpu:0"},
               [&] { devices[0].run("inside", [&] { loss.backward(); }); });
}

TEST(Graphs, AFailureNestsTheOriginalException) {
  struct ThrowsImpl : torch::nn::Cloneable<ThrowsImpl> {
    void reset() override {}
    torch::Tensor forward(const torch::Tensor&) { throw std::out_of_range("the original"); }
  };
  const Devices devices("cpu:2");
  DataParallel<ThrowsImpl> parallel(std::make_shared<ThrowsImpl>(), devices);
  try {
    parallel(torch::ones({2, 1}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

}  // namespace
}  // namespace lockstep::test::data_parallel_graph_test
