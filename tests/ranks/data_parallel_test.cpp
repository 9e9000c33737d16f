// DataParallel on logical CPU devices: parity with one device; the rules of splitting, gathering,
// replicas, memory and traffic; what it refuses.

#include "lockstep/data_parallel.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ranks/nets.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::data_parallel_test {
namespace {

using test::expect_close;
using test::expect_error;
using test::Many;
using test::Net;

// Losses and weights of some SGD steps; `predict` is the net itself or a DataParallel around it.
template <class Predict>
std::vector<double> train(Net& net, Predict&& predict, int64_t rows, int steps) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::manual_seed(7);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({rows, 6});
    const auto y = torch::randn({rows, 3});
    net->zero_grad(true);
    const auto loss = torch::mse_loss(predict(x), y);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

Net seeded_net() {
  torch::manual_seed(3);
  return Net();
}

class Parity : public testing::TestWithParam<std::tuple<int, int64_t>> {};

TEST_P(Parity, WeightsAndLossesEqualOneDevice) {
  const auto [count, rows] = GetParam();
  Net alone = seeded_net();
  const auto expected = train(
      alone, [&](const auto& x) { return alone->forward(x); }, rows, 20);

  const Devices devices("cpu:" + std::to_string(count));
  const UseDevice home(devices[0]);
  Net net = seeded_net();
  DataParallel parallel(net, devices);
  const auto losses = train(
      net, [&](const auto& x) { return parallel(x); }, rows, 20);

  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); ++i)
    EXPECT_NEAR(losses[i], expected[i], 1e-5) << "step " << i;
  for (const auto& item : alone->named_parameters()) {
    expect_close(net->named_parameters()[item.key()], item.value(), item.key());
  }
}

INSTANTIATE_TEST_SUITE_P(DevicesAndRows, Parity,
                         testing::Combine(testing::Values(1, 2, 3, 5, 7),
                                          testing::Values(64, 9, 5, 1)));

TEST(DataParallel, TheSameRunTwiceIsBitwiseEqual) {
  const auto run = [] {
    const Devices devices("cpu:3");
    const UseDevice home(devices[0]);
    Net net = seeded_net();
    DataParallel parallel(net, devices);
    train(
        net, [&](const auto& x) { return parallel(x); }, 20, 10);
    return torch::cat({net->first->weight.flatten(), net->second->weight.flatten()}).clone();
  };
  EXPECT_TRUE(torch::equal(run(), run()));
}

TEST(DataParallel, SplitsByChunksRule) {
  const Devices devices("cpu:4");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  EXPECT_EQ(parallel.split(torch::zeros({9, 6})), (std::vector<int64_t>{3, 3, 3}));
  EXPECT_EQ(parallel.split(torch::zeros({64, 6})), (std::vector<int64_t>{16, 16, 16, 16}));
}

// Remembers which device saw how many rows, from inside forward.
struct RowRecorderImpl : torch::nn::Cloneable<RowRecorderImpl> {
  explicit RowRecorderImpl(std::shared_ptr<std::vector<int64_t>> seen)
      : rows_seen(std::move(seen)) {
    reset();
  }
  void reset() override { weight = register_parameter("weight", torch::ones({2})); }
  torch::Tensor forward(const torch::Tensor& x) {
    (*rows_seen)[static_cast<size_t>(current_device()->index())] = x.size(0);
    return x * weight;
  }
  torch::Tensor weight;
  std::shared_ptr<std::vector<int64_t>> rows_seen;
};
TORCH_MODULE(RowRecorder);

TEST(DataParallel, EachReplicaSeesItsRowsOnItsDeviceAndUnusedDevicesSeeNone) {
  const Devices devices("cpu:4");
  const UseDevice home(devices[0]);
  const auto seen = std::make_shared<std::vector<int64_t>>(4, -1);
  RowRecorder recorder(seen);
  DataParallel parallel(recorder, devices);
  const auto x = torch::arange(18, torch::kFloat32).reshape({9, 2});
  EXPECT_TRUE(torch::equal(parallel(x), x));
  EXPECT_EQ(*seen, (std::vector<int64_t>{3, 3, 3, -1}));
}

TEST(DataParallel, NoRowsRunEveryReplicaOnAnEmptyBatch) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto out = parallel(torch::zeros({0, 6}));
  EXPECT_EQ(out.sizes(), (torch::IntArrayRef{0, 3}));
  out.sum().backward();
  EXPECT_TRUE(torch::equal(net->second->bias.grad(), torch::zeros({3})));
}

TEST(DataParallel, GradientsAccumulateOverBackwards) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto x = torch::randn({5, 6});
  parallel(x).sum().backward();
  const auto once = net->first->weight.grad().clone();
  parallel(x).sum().backward();
  expect_close(net->first->weight.grad(), 2 * once, "accumulated");
}

TEST(DataParallel, GivesInputsTheirGradients) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto x = torch::randn({7, 6}).requires_grad_();
  const auto same = x.detach().clone().requires_grad_();
  // Not a leaf, so the gradient must continue through the graph before DataParallel.
  (parallel(x * 2) * torch::arange(7).unsqueeze(1)).sum().backward();
  (net->forward(same * 2) * torch::arange(7).unsqueeze(1)).sum().backward();
  expect_close(x.grad(), same.grad(), "input gradient");
}

TEST(DataParallel, RetainGraphAllowsASecondBackwardAndItsAbsenceIsRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto loss = parallel(torch::randn({4, 6})).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = net->first->weight.grad().clone();
  loss.backward();
  expect_close(net->first->weight.grad(), 2 * once, "second backward");
  EXPECT_THROW(loss.backward(), std::exception);
}

TEST(DataParallel, SecondDerivativesAreRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto loss = parallel(torch::randn({4, 6})).pow(2).sum();
  expect_error(Code::kEngine, {"twice"}, [&] { loss.backward({}, true, /*create_graph=*/true); });
}

TEST(DataParallel, WithoutGradModeNothingIsRecorded) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({5, 6});
  const auto out = parallel(x);
  EXPECT_FALSE(out.requires_grad());
  expect_close(out, net->forward(x), "inference");
}

TEST(DataParallel, FrozenParametersGetNoGradientAndThawedOnesDo) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  net->first->weight.set_requires_grad(false);
  parallel(torch::randn({4, 6})).sum().backward();
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_TRUE(net->second->weight.grad().defined());
  net->first->weight.set_requires_grad(true);
  parallel(torch::randn({4, 6})).sum().backward();
  EXPECT_TRUE(net->first->weight.grad().defined());
}

TEST(DataParallel, ReplicasFollowWeightsChangedInAnyWay) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const auto x = torch::randn({4, 6});
  const torch::NoGradGuard no_grad;
  net->first->weight.data().mul_(0.5);  // behind autograd's back: no version counter moves
  expect_close(parallel(x), net->forward(x), "after .data()");
  net->to(torch::kFloat64);
  expect_close(parallel(x.to(torch::kFloat64)), net->forward(x.to(torch::kFloat64)),
               "after a change of dtype");
}

TEST(DataParallel, MakingItDrawsNoRandomNumbers) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Net net;
  torch::manual_seed(5);
  const auto expected = torch::rand({4});
  torch::manual_seed(5);
  DataParallel parallel(net, devices);
  parallel(torch::zeros({6, 6}));
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST(DataParallel, DropoutIsTheSameAfterEverySeeding) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(6, 32), torch::nn::Dropout(0.5));
  DataParallel parallel(net, devices);
  const auto x = torch::randn({9, 6});
  const auto two_steps = [&] {
    torch::manual_seed(5);
    std::vector<torch::Tensor> outputs;
    for (int step = 0; step < 2; ++step) {
      outputs.push_back(parallel(x));
      outputs.back().sum().backward();
    }
    EXPECT_FALSE(torch::equal(outputs[0], outputs[1])) << "each step drops other units";
    return torch::cat(outputs).detach();
  };
  const auto expected = two_steps();
  EXPECT_TRUE(torch::equal(two_steps(), expected)) << "nothing drawn in between";
  torch::rand({4});
  EXPECT_TRUE(torch::equal(two_steps(), expected)) << "numbers drawn in between";
  torch::rand({4});
  parallel(x);
  EXPECT_TRUE(torch::equal(two_steps(), expected)) << "a forward in between";
}

// ---- Arguments and results of other shapes ----

// c10::optional is libtorch 1.13's own, and std::optional in 2.x.
struct MaybeImpl : torch::nn::Cloneable<MaybeImpl> {
  using Maybe = c10::optional<torch::Tensor>;
  MaybeImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::full({1}, 2.0)); }
  std::tuple<Maybe, std::vector<Maybe>> forward(const torch::Tensor& x, const Maybe& y) {
    if (!y) return {c10::nullopt, {x * scale}};
    return {*y * scale, {x * scale, c10::nullopt}};
  }
  torch::Tensor scale;
};
TORCH_MODULE(Maybe);

TEST(DataParallel, TakesAndReturnsLibtorchsOwnOptionals) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Maybe net;
  DataParallel parallel(net, devices);
  const auto x = torch::randn({5, 2});
  const auto y = torch::randn({5, 3});
  const auto [scaled, list] = parallel(x, c10::optional<torch::Tensor>(y));
  ASSERT_TRUE(scaled.has_value());
  expect_close(*scaled, y * 2, "an optional in a tuple");
  ASSERT_EQ(list.size(), 2U);
  expect_close(list[0].value(), x * 2, "an optional in a vector");
  EXPECT_FALSE(list[1].has_value());
  (scaled->sum() + list[0]->sum()).backward();
  expect_close(net->scale.grad(), (x.sum() + y.sum()).reshape({1}), "gradient");

  const auto [none, only_x] = parallel(x, c10::optional<torch::Tensor>());
  EXPECT_FALSE(none.has_value());
  expect_close(only_x.at(0).value(), x * 2, "without the other input");
}

TEST(DataParallel, TakesAndReturnsTuplesMapsAndVectors) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Many many;
  DataParallel parallel(many, devices);
  const auto a = torch::randn({7, 2});
  const auto b = torch::randn({7, 4});
  const auto z = torch::randn({7, 1});
  const auto [scaled, named, list] =
      parallel(std::pair(a, b), std::map<std::string, torch::Tensor>{{"z", z}}, 3.0);
  expect_close(scaled, a * 6, "tuple element");
  expect_close(named.at("sum"), b + z, "map element");
  EXPECT_TRUE(torch::equal(named.at("rows"),
                           torch::tensor({3, 3, 3, 3, 3, 3, 1}).to(named.at("rows").dtype())));
  // A scalar from each replica is gathered into a vector, as PyTorch does.
  expect_close(
      list.at(0),
      torch::stack({z.slice(0, 0, 3).sum(), z.slice(0, 3, 6).sum(), z.slice(0, 6, 7).sum()}),
      "scalars");
  (scaled.sum() + named.at("sum").sum() + list.at(0).sum()).backward();
  expect_close(many->scale.grad(), (a * 3).sum().reshape({1}),
               "gradient through one of several outputs");
}

TEST(DataParallel, OutputsThatAreNotUsedInTheLossCostNothing) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Many many;
  DataParallel parallel(many, devices);
  const auto a = torch::randn({4, 2});
  const auto result = parallel(
      std::pair(a, a), std::map<std::string, torch::Tensor>{{"z", torch::ones({4, 1})}}, 1.0);
  EXPECT_FALSE(std::get<1>(result).at("rows").requires_grad());
  std::get<0>(result).sum().backward();
  expect_close(many->scale.grad(), a.sum().reshape({1}), "gradient");
}

// ---- Buffers, modes, ties ----

TEST(DataParallel, KeepsTheBuffersOfReplicaZero) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::BatchNorm1d norm(2);
  DataParallel parallel(norm, devices);
  const auto x = torch::cat({torch::ones({4, 2}), torch::full({4, 2}, 100.0)});
  parallel(x);
  // Momentum 0.1 of the mean of replica 0's rows only.
  expect_close(norm->running_mean, torch::full({2}, 0.1), "running mean");
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  norm->eval();
  const auto before = norm->running_mean.clone();
  parallel(x);
  EXPECT_TRUE(torch::equal(norm->running_mean, before)) << "eval mode must reach the replicas";
}

struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { reset(); }
  void reset() override {
    a = register_parameter("a", torch::full({2}, 3.0));
    b = register_parameter("b", a);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * a + b; }
  torch::Tensor a, b;
};
TORCH_MODULE(Tied);

TEST(DataParallel, ATiedParameterIsCountedOnce) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Tied tied;
  Tied alone;
  DataParallel parallel(tied, devices);
  const auto x = torch::randn({4, 2});
  parallel(x).sum().backward();
  alone->forward(x).sum().backward();
  expect_close(tied->a.grad(), alone->a.grad(), "tied gradient");
  torch::optim::SGD optimizer(parallel.parameters(), 1.0);
  const auto updated = tied->a.detach() - tied->a.grad();
  optimizer.step();
  expect_close(tied->a.detach(), updated, "tied weight");
}

struct LimitedImpl : torch::nn::Cloneable<LimitedImpl> {
  LimitedImpl() { reset(); }
  void reset() override {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 4).max_norm(1.0)));
    const torch::NoGradGuard no_grad;
    table->weight.copy_(torch::arange(24).view({6, 4}).add(1).sin().mul(3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return table(x).sum(1); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Limited);

// The rows that only replica 1 looks up are shortened in the module too.
TEST(DataParallel, AnEmbeddingWithMaxNormTrainsAsOnOneDevice) {
  const Devices devices("cpu:2");
  Limited alone;
  Limited net;
  DataParallel parallel(net, devices);
  torch::optim::SGD alone_optimizer(alone->parameters(), 0.5);
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  const auto x = torch::tensor({{0, 1}, {2, 1}, {3, 4}, {5, 4}}, torch::kLong);
  for (int step = 0; step < 3; ++step) {
    alone->zero_grad();
    net->zero_grad();
    alone->forward(x).square().sum().backward();
    parallel(x).square().sum().backward();
    expect_close(net->table->weight.detach(), alone->table->weight.detach(), "before the update");
    alone_optimizer.step();
    optimizer.step();
    expect_close(net->table->weight.detach(), alone->table->weight.detach(), "after the update");
  }
}

TEST(DataParallel, SequentialWorks) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::ReLU(), torch::nn::Linear(4, 2));
  DataParallel parallel(net, devices);
  const auto x = torch::randn({5, 3});
  expect_close(parallel(x), net->forward(x), "sequential");
}

// ---- Memory: what device 0 holds beyond the others ----

TEST(DataParallel, AtRestDeviceZeroHoldsTheGradientsBeyondTheWeightsAllHold) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Net net;
  const int64_t weight_bytes = (6 * 10 + 10 + 10 * 3 + 3) * 4;
  DataParallel parallel(net, devices);
  EXPECT_EQ(devices[0].memory().live_bytes, weight_bytes);
  EXPECT_EQ(devices[1].memory().live_bytes, weight_bytes);
  {
    const auto x = torch::randn({9, 6});
    parallel(x).sum().backward();
  }
  EXPECT_EQ(devices[0].memory().live_bytes, 2 * weight_bytes) << "weights and gradients";
  EXPECT_EQ(devices[1].memory().live_bytes, weight_bytes) << "weights only";
  EXPECT_EQ(devices[2].memory().live_bytes, weight_bytes) << "weights only";
}

TEST(DataParallel, TrafficIsWeightsRowsOutputsAndGradients) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  const int64_t weight_bytes = (6 * 10 + 10 + 10 * 3 + 3) * 4;
  parallel(torch::randn({8, 6})).sum().backward();
  const int64_t to_replica =
      weight_bytes + 4 * 6 * 4 + 4 * 3 * 4;  // weights, its rows, its output's gradient
  const int64_t from_replica = 4 * 3 * 4 + weight_bytes;  // its output, its gradients
  EXPECT_EQ(devices[0].traffic().sent_bytes, to_replica);
  EXPECT_EQ(devices[1].traffic().received_bytes, to_replica);
  EXPECT_EQ(devices[1].traffic().sent_bytes, from_replica);
  EXPECT_EQ(devices[0].traffic().received_bytes, from_replica);
}

struct PlainImpl : torch::nn::Module {
  PlainImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};

TEST(DataParallelRefuses, AModuleWithoutCloneIsRefusedWithARemedyAndWorksWithAFactory) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  const auto plain = std::make_shared<PlainImpl>();
  expect_error(Code::kReplicate, {"Cloneable"},
               [&] { DataParallel<PlainImpl> parallel(plain, devices); });
  DataParallel<PlainImpl> parallel(plain, devices, [] { return std::make_shared<PlainImpl>(); });
  const auto x = torch::randn({4, 2});
  expect_close(parallel(x), plain->forward(x), "factory");
  expect_error(Code::kReplicate, {"of its own"},
               [&] { DataParallel<PlainImpl> wrong(plain, devices, [&] { return plain; }); });
}

struct FussyImpl : torch::nn::Cloneable<FussyImpl> {
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) {
    if (current_device()->index() == 1) throw std::runtime_error("row 5 is bad");
    return x;
  }
};
TORCH_MODULE(Fussy);

TEST(DataParallelRefuses, AFailingReplicaIsNamedAndTheNextForwardWorks) {
  const Devices devices("cpu:3");
  const UseDevice home(devices[0]);
  Fussy fussy;
  DataParallel parallel(fussy, devices);
  expect_error(Code::kReplicaFailed, {"replica 1 on cpu:1: row 5 is bad"}, [&] {
    parallel(torch::zeros({6, 1}));
  });
  EXPECT_EQ(parallel(torch::zeros({1, 1})).size(0), 1) << "one row uses device 0 only";
}

TEST(DataParallelRefuses, RefusesInputsThatCannotBeDivided) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Many many;
  DataParallel parallel(many, devices);
  const std::map<std::string, torch::Tensor> short_map{{"z", torch::ones({3, 1})}};
  expect_error(Code::kSplit, {"3 rows, others have 4"}, [&] {
    parallel(std::pair(torch::ones({4, 1}), torch::ones({4, 1})), short_map, 1.0);
  });
  Net net;
  DataParallel plain(net, devices);
  expect_error(Code::kSplit, {"a scalar"}, [&] { plain(torch::tensor(1.0)); });
}

TEST(DataParallelRefuses, AModuleOnAnotherDeviceIsRefused) {
  const Devices devices("cpu:2");
  Net net{nullptr};
  {
    const UseDevice other(devices[1]);
    net = Net();
  }
  expect_error(Code::kPlacement, {"\"first.weight\" is on cpu:1, not on cpu:0"},
               [&] { DataParallel parallel(net, devices); });
}

TEST(DataParallelRefuses, AModuleThatGrewIsRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Net net;
  DataParallel parallel(net, devices);
  net->register_parameter("late", torch::ones({1}));
  expect_error(Code::kReplicate, {"after DataParallel was made"}, [&] {
    parallel(torch::zeros({4, 6}));
  });
}

struct LopsidedImpl : torch::nn::Cloneable<LopsidedImpl> {
  void reset() override {}
  std::map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
    return {{current_device()->index() == 0 ? "a" : "b", x}};
  }
};
TORCH_MODULE(Lopsided);

TEST(DataParallelRefuses, ReplicasThatReturnOtherKeysAreRefused) {
  const Devices devices("cpu:2");
  const UseDevice home(devices[0]);
  Lopsided lopsided;
  DataParallel parallel(lopsided, devices);
  expect_error(Code::kSplit, {"another arrangement"}, [&] { parallel(torch::zeros({4, 1})); });
}

}  // namespace
}  // namespace lockstep::test::data_parallel_test
