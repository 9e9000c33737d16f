// Linear layers with few rows on the CPU: lockstep's kernels against libtorch's, alone and in
// wrappers that listen to their gradients.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp_nets.hpp"
#include "kernels/linear_bf16_kernels.hpp"
#include "kernels/linear_kernels.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/fused_layers.hpp"
#include "lockstep/optim.hpp"
#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "pipeline_support.hpp"
#include "rank_threads.hpp"

namespace lockstep::test::cpu_linear_test {
namespace {

using torch::Tensor;

class CpuLinear : public testing::Test {
 protected:
  void SetUp() override {
    if (linear_kernels() == nullptr) GTEST_SKIP() << "this machine has no AVX2";
    torch::manual_seed(1);
  }
};
using CpuLinearRanks = CpuLinear;

// Whether the graph behind this tensor has a node of the kernels.
bool uses_kernels(const Tensor& y) {
  return y.grad_fn() && y.grad_fn()->name() == "lockstep::CpuLinearBackward";
}

Tensor random(at::IntArrayRef sizes) {
  return torch::randn(sizes).requires_grad_();
}

void expect_same_gradients(const Tensor& actual, const Tensor& expected,
                           const std::vector<Tensor>& inputs) {
  const auto seed = torch::randn(expected.sizes());
  const auto mine = torch::autograd::grad({actual}, inputs, {seed});
  const auto theirs = torch::autograd::grad({expected}, inputs, {seed});
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(mine[i], theirs[i], "gradient of input " + std::to_string(i));
  }
}

TEST_F(CpuLinear, GivesTheValuesAndGradientsOfTorchLinear) {
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{4, 9}, {32, 40}, {3, 11, 17}, {2, 3, 5, 24}, {128, 33}}) {
    SCOPED_TRACE(testing::Message() << at::IntArrayRef(sizes));
    const auto x = random(sizes);
    const auto weight = random({13, sizes.back()});
    const auto bias = random({13});
    const auto y = lockstep::linear(x, weight, bias);
    EXPECT_TRUE(uses_kernels(y));
    expect_close(y, torch::linear(x, weight, bias), "output");
    expect_same_gradients(y, torch::linear(x, weight, bias), {x, weight, bias});
    expect_same_gradients(lockstep::linear(x, weight, Tensor()), torch::linear(x, weight),
                          {x, weight});
  }
}

TEST_F(CpuLinear, TakesRowsInAnyMemoryOrder) {
  const auto x = random({24, 8});
  const auto weight = random({6, 24});
  expect_close(lockstep::linear(x.t(), weight, Tensor()), torch::linear(x.t(), weight),
               "transposed");
  expect_same_gradients(lockstep::linear(x.t(), weight, Tensor()), torch::linear(x.t(), weight),
                        {x, weight});
  const auto row = random({1, 24});
  expect_same_gradients(lockstep::linear(row.expand({5, 24}), weight, Tensor()),
                        torch::linear(row.expand({5, 24}), weight), {row, weight});
  // A gradient that is expanded, as that of a sum.
  const auto mine =
      torch::autograd::grad({lockstep::linear(x.t(), weight, Tensor()).sum()}, {weight});
  const auto theirs = torch::autograd::grad({torch::linear(x.t(), weight).sum()}, {weight});
  expect_close(mine[0], theirs[0], "gradient of a sum");
}

TEST_F(CpuLinear, LeavesTheRestToLibtorch) {
  const auto weight = random({6, 24});
  for (const auto& [x, w] : std::vector<std::pair<Tensor, Tensor>>{
           {random({3, 24}), weight},    // too few rows
           {random({129, 24}), weight},  // too many
           {random({8, 24}), random({24, 6}).t()},
           {random({8, 24}).to(torch::kDouble), weight.to(torch::kDouble)}}) {
    EXPECT_FALSE(uses_kernels(lockstep::linear(x, w, Tensor())));
  }
  EXPECT_FALSE(lockstep::linear(torch::randn({8, 24}), weight.detach(), Tensor()).requires_grad());
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({8, 24});
  expect_close(lockstep::linear(x, weight, Tensor()), torch::linear(x, weight), "without a graph");
}

TEST_F(CpuLinear, ComputesOnlyTheGradientsThatAreWanted) {
  const auto x = torch::randn({8, 5});
  auto weight = random({3, 5});
  const auto frozen = torch::randn({3, 5});
  lockstep::linear(x, weight, Tensor()).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_FALSE(x.grad().defined());
  const auto y = random({8, 5});
  lockstep::linear(y, frozen, Tensor()).sum().backward();
  EXPECT_TRUE(y.grad().defined());
}

TEST_F(CpuLinear, CanBeDifferentiatedTwice) {
  const auto x = random({8, 5});
  const auto weight = random({3, 5});
  const auto bias = random({3});
  const auto penalty = [&](const Tensor& y) {
    const auto gradient =
        torch::autograd::grad({y.pow(3).sum()}, {x, weight}, /*grad_outputs=*/{}, true, true);
    return gradient[0].square().sum() + gradient[1].square().sum();
  };
  const std::vector<Tensor> inputs = {x, weight, bias};
  const auto mine = torch::autograd::grad({penalty(lockstep::linear(x, weight, bias))}, inputs);
  const auto theirs = torch::autograd::grad({penalty(torch::linear(x, weight, bias))}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(mine[i] / theirs[i].abs().max(), theirs[i] / theirs[i].abs().max(),
                 "second derivative " + std::to_string(i));
  }
}

TEST_F(CpuLinear, ARowHasTheSameBitsInAnyBatchAndOnAnyNumberOfThreads) {
  const auto x = torch::randn({96, 130});
  const auto weight = torch::randn({150, 130});
  const auto bias = torch::randn({150});
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);
  const auto whole = lockstep::linear(x, weight, bias);
  torch::set_num_threads(3);
  EXPECT_TRUE(lockstep::linear(x, weight, bias).equal(whole));
  torch::set_num_threads(threads);
  for (const int64_t rows : {4, 19, 48}) {
    EXPECT_TRUE(
        lockstep::linear(x.narrow(0, 7, rows), weight, bias).equal(whole.narrow(0, 7, rows)));
  }
}

TEST_F(CpuLinear, TheModuleIsThatOfLibtorch) {
  torch::manual_seed(5);
  torch::nn::Linear theirs(12, 7);
  torch::manual_seed(5);
  Linear layer(12, 7);
  EXPECT_TRUE(layer->weight.equal(theirs->weight));
  EXPECT_TRUE(layer->bias.equal(theirs->bias));
  EXPECT_EQ(layer->named_parameters().keys(), theirs->named_parameters().keys());
  const auto x = torch::randn({16, 12});
  EXPECT_TRUE(uses_kernels(layer(x)));
  expect_close(layer(x), theirs(x), "output");
  EXPECT_FALSE(uses_kernels(layer(torch::randn({300, 12}))));
  EXPECT_THROW(layer(torch::randn({16, 11})), Error);

  Linear without(torch::nn::LinearOptions(12, 7).bias(false));
  EXPECT_EQ(without->parameters().size(), 1U);
  EXPECT_EQ(without(x).sizes(), (std::vector<int64_t>{16, 7}));

  torch::nn::Sequential net(Linear(12, 7), torch::nn::ReLU());
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(copy->forward(x).equal(net->forward(x)));
  EXPECT_FALSE(copy->parameters()[0].is_alias_of(net->parameters()[0]));
}

// Equal within the rounding of bfloat16, relative to the largest value.
void expect_near_bf16(const Tensor& actual, const Tensor& expected, const std::string& what) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const auto a = actual.to(torch::kDouble);
  const auto b = expected.to(torch::kDouble);
  EXPECT_LT((a - b).abs().max().item<double>(), b.abs().max().item<double>() / 100) << what;
}

TEST_F(CpuLinear, UnderAutocastFactorsAreRoundedToBfloat16) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{16, 12}, {5, 7, 33}}) {
    Linear layer(sizes.back(), 13);
    const auto x = random(sizes);
    const auto run = [&](bool ours) {
      layer->zero_grad();
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      const auto y = ours ? layer(x) : torch::linear(x, layer->weight, layer->bias);
      EXPECT_EQ(uses_kernels(y), ours && linear_bf16_kernels() != nullptr);
      const auto gradients =
          torch::autograd::grad({y}, {x, layer->weight, layer->bias}, {torch::ones_like(y)});
      return std::vector<Tensor>{y, gradients[0], gradients[1], gradients[2]};
    };
    const auto expected = run(false);
    const auto actual = run(true);
    for (size_t i = 0; i < expected.size(); ++i) {
      expect_near_bf16(actual[i], expected[i], "tensor " + std::to_string(i));
    }
  }
}

TEST_F(CpuLinear, ABfloat16ModuleHasBfloat16Gradients) {
  Linear layer(24, 13);
  layer->to(torch::kBFloat16);
  const auto x = torch::randn({16, 24}).to(torch::kBFloat16).requires_grad_();
  const auto y = layer(x);
  EXPECT_EQ(uses_kernels(y), linear_bf16_kernels() != nullptr);
  const auto theirs = torch::linear(x, layer->weight, layer->bias);
  expect_near_bf16(y, theirs, "output");
  const std::vector<Tensor> inputs = {x, layer->weight, layer->bias};
  const auto mine = torch::autograd::grad({y}, inputs, {torch::ones_like(y)});
  const auto expected = torch::autograd::grad({theirs}, inputs, {torch::ones_like(y)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_near_bf16(mine[i], expected[i], "gradient " + std::to_string(i));
  }
}

TEST_F(CpuLinear, AutocastThatIsOffRoundsNothing) {
  Linear layer(12, 7);
  const auto x = torch::randn({16, 12});
  const Autocast amp(torch::kCPU, torch::kBFloat16);
  const Autocast off(torch::kCPU, torch::kBFloat16, false);
  EXPECT_EQ(layer(x).scalar_type(), torch::kFloat);
  EXPECT_TRUE(uses_kernels(layer(x)));
}

// Two layers, of lockstep or of libtorch, with weights that are the same everywhere.
template <class Linear>
struct PairImpl : torch::nn::Module {
  PairImpl() {
    first = register_module("first", Linear(6, 8));
    second = register_module("second", Linear(8, 3));
    const torch::NoGradGuard no_grad;
    for (auto& each : parameters()) {
      each.copy_(torch::arange(each.numel()).view(each.sizes()).mul(0.37).sin() * 0.3);
    }
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }

  Linear first{nullptr}, second{nullptr};
};

// Trains them on `comm`'s ranks for some steps, and returns the weights.
template <class Linear>
Tensor train(const Communicator& comm, int accumulate, bool set_to_none) {
  const auto net = std::make_shared<PairImpl<Linear>>();
  DistributedDataParallel ddp(net, comm,
                              DdpOptions{.first_bucket_bytes = 64, .bucket_cap_bytes = 256});
  Sgd optimizer(ddp.parameters(), {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad(set_to_none);
    for (int micro = 0; micro < accumulate; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro + 1 < accumulate) no_sync.emplace(ddp);
      const auto x = rows(8, 6, comm.rank() + 3 * micro + 7 * step);
      torch::mse_loss(ddp(x), torch::sin(x.narrow(1, 0, 3))).backward();
    }
    optimizer.step();
  }
  return flat_weights(ddp.parameters());
}

TEST_F(CpuLinearRanks, DdpTrainsAsWithLibtorchsProducts) {
  for (const int size : {1, 2, 3, 5}) {
    for (const int accumulate : {1, 3}) {
      for (const bool set_to_none : {true, false}) {
        SCOPED_TRACE(testing::Message() << size << " ranks, " << accumulate << " micro-steps, "
                                        << (set_to_none ? "none" : "zeros"));
        std::vector<Tensor> expected(static_cast<size_t>(size));
        run_ranks(size, [&](const Communicator& comm) {
          expected[static_cast<size_t>(comm.rank())] =
              train<torch::nn::Linear>(comm, accumulate, set_to_none);
        });
        run_ranks(size, [&](const Communicator& comm) {
          const auto weights = train<Linear>(comm, accumulate, set_to_none);
          expect_close(weights, expected[static_cast<size_t>(comm.rank())], "weights");
          expect_same_on_all(comm, weights, "weights");
        });
      }
    }
  }
}

TEST_F(CpuLinearRanks, TheFirstGradientOfAWeightIsComputedInItsBucket) {
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<PairImpl<Linear>>();
    DistributedDataParallel ddp(net, comm);
    std::vector<const void*> seen;
    for (auto& weight : {net->first->weight, net->second->weight}) {
      weight.register_hook(
          [&seen](const Tensor& gradient) { seen.push_back(gradient.data_ptr()); });
    }
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      ddp.zero_grad();
      ddp(rows(8, 6, comm.rank())).sum().backward();
      ASSERT_EQ(seen.size(), 2U);
      EXPECT_EQ(seen[0], net->second->weight.grad().data_ptr());
      EXPECT_EQ(seen[1], net->first->weight.grad().data_ptr());
    }
  });
}

// One weight twice in a graph: two gradients claim the same memory and are then added.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    layer = register_module("layer", Linear(6, 6));
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(torch::arange(36).view({6, 6}).mul(0.37).sin());
    layer->bias.zero_();
  }
  Tensor forward(const Tensor& x) { return layer(torch::tanh(layer(x))); }
  Linear layer{nullptr};
};
TORCH_MODULE(Twice);

TEST_F(CpuLinearRanks, AWeightThatIsUsedTwiceGetsTheSumOfItsGradients) {
  Twice alone;
  for (int rank = 0; rank < 2; ++rank) alone->forward(rows(8, 6, rank)).square().sum().backward();
  const auto expected = alone->layer->weight.grad() / 2;
  run_ranks(2, [&](const Communicator& comm) {
    Twice net;
    DistributedDataParallel ddp(net, comm);
    for (int step = 0; step < 3; ++step) {  // the second arranges the buckets anew
      ddp.zero_grad();
      ddp(rows(8, 6, comm.rank())).square().sum().backward();
      expect_close(net->layer->weight.grad(), expected, "step " + std::to_string(step));
    }
  });
}

TEST_F(CpuLinearRanks, AKeptGradientKeepsItsValues) {
  run_ranks(2, [](const Communicator& comm) {
    const auto net = std::make_shared<PairImpl<Linear>>();
    DistributedDataParallel ddp(net, comm);
    ddp(rows(8, 6, 0)).sum().backward();
    const auto kept = net->first->weight.grad();
    const auto values = kept.clone();
    ddp.zero_grad();
    ddp(rows(8, 6, 5)).sum().backward();
    EXPECT_TRUE(kept.equal(values));
    EXPECT_FALSE(net->first->weight.grad().equal(values));
    // The same for gradients that never were a parameter's.
    const auto loss = net->forward(rows(8, 6, 1)).sum();
    const auto own = torch::autograd::grad({loss}, {net->second->weight})[0];
    const auto own_values = own.clone();
    ddp.zero_grad();
    ddp(rows(8, 6, 9)).sum().backward();
    EXPECT_TRUE(own.equal(own_values));
  });
}

template <class Linear>
torch::nn::Sequential deep_net() {
  torch::manual_seed(7);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

TEST_F(CpuLinear, SplitBackwardsAndReplicasGetTheSameGradients) {
  const auto x = torch::randn({16, kWidth});
  const auto losses = [&](const torch::nn::Sequential& net, const Schedule& schedule) {
    Pipeline pipeline(cut(net, 2), Devices("cpu:2"), schedule, {.loss = mse});
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    std::vector<double> values;
    for (int step = 0; step < 3; ++step) {
      values.push_back(pipeline.step(x, x).item<double>());
      optimizer.step();
      optimizer.zero_grad();
    }
    return values;
  };
  const auto expected = losses(deep_net<torch::nn::Linear>(), gpipe(2, 2));
  const auto actual = losses(deep_net<Linear>(), gpipe(2, 2));
  EXPECT_EQ(losses(deep_net<Linear>(), zero_bubble(2, 2)), actual);  // the same bits in any order
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5);

  auto net = deep_net<Linear>();
  DataParallel parallel(net, Devices("cpu:2"));
  parallel(x).square().sum().backward();
  const auto gradient = net->parameters()[0].grad().clone();
  net->zero_grad();
  net->forward(x).square().sum().backward();
  expect_close(gradient, net->parameters()[0].grad(), "DataParallel");
}

TEST_F(CpuLinear, WorksWithoutTheWrapperThatOfferedMemory) {
  const auto net = std::make_shared<PairImpl<Linear>>();
  Tensor loss;
  run_ranks(1, [&](const Communicator& comm) {
    DdpOptions options;
    options.hook = [](const Communicator&, const GradientBucket&, double) { return Work(); };
    DistributedDataParallel ddp(net, comm, options);
    loss = ddp.module()->forward(rows(8, 6, 0)).sum();
  });
  loss.backward();  // the wrapper is gone
  const auto gradient = net->first->weight.grad().clone();
  net->zero_grad();
  net->forward(rows(8, 6, 0)).sum().backward();
  EXPECT_TRUE(gradient.equal(net->first->weight.grad()));
}

}  // namespace
}  // namespace lockstep::test::cpu_linear_test
