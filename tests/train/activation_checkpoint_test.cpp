// checkpoint_activations against the same function without it: the same bits, less memory.

#include "lockstep/activation_checkpoint.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "ranks/rank_threads.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::activation_checkpoint_test {
namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr int64_t kWidth = 8;

// A block with dropout; `recompute` decides whether its activations are kept.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(bool recomputed = false, int64_t features = kWidth)
      : recompute(recomputed), width(features) {
    BlockImpl::reset();
  }
  void reset() override {
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor compute(const torch::Tensor& x) {
    const auto hidden = torch::dropout(torch::gelu(up(x)), 0.25, is_training());
    return x + torch::tanh(down(hidden));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (!recompute) return compute(x);
    return checkpoint_activations([this](const torch::Tensor& rows) { return compute(rows); }, x);
  }
  bool recompute;
  int64_t width;
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

torch::nn::Sequential blocks(int64_t count, bool recompute, int64_t width = kWidth) {
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < count; ++i) net->push_back(Block(recompute, width));
  return net;
}

Tensors gradients_of(const torch::nn::Module& module) {
  Tensors gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

void expect_same_bits(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (!actual[i].defined()) continue;
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
  }
}

TEST(ActivationCheckpoint, OutputsAndGradientsHaveTheSameBitsWithDropout) {
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    auto net = blocks(3, recompute);
    torch::manual_seed(11);
    const auto x = torch::randn({5, kWidth}).requires_grad_();
    const auto out = net->forward(x);
    const auto drawn = torch::rand({3});  // the program's numbers go on as they would
    out.square().sum().backward();
    auto all = gradients_of(*net);
    all.insert(all.end(), {out.detach(), x.grad(), drawn, torch::rand({3})});
    results.push_back(all);
  }
  expect_same_bits(results[1], results[0]);
}

TEST(ActivationCheckpoint, TakesModulesFunctionsAndPointers) {
  torch::nn::Linear linear(3, 3);
  const auto x = torch::randn({2, 3}).requires_grad_();
  const auto expected = linear(x);
  EXPECT_TRUE(torch::equal(checkpoint_activations(linear, x), expected));
  EXPECT_TRUE(torch::equal(checkpoint_activations(linear.ptr(), x), expected));
  torch::nn::Sequential both(linear, torch::nn::Tanh());
  EXPECT_TRUE(torch::equal(checkpoint_activations(both, x), torch::tanh(expected)));
  EXPECT_TRUE(torch::equal(
      checkpoint_activations([&](const torch::Tensor& t) { return linear(t); }, x), expected));
}

TEST(ActivationCheckpoint, SeveralInputsAndOutputsOfAnyArrangement) {
  using Named = std::map<std::string, torch::Tensor>;
  const auto function = [](const std::pair<torch::Tensor, torch::Tensor>& both, const Named& named,
                           double factor) {
    return std::tuple<torch::Tensor, Named, std::vector<torch::Tensor>>{
        both.first * both.second * factor,
        {{"sum", both.first + named.at("z")}, {"count", torch::tensor(4)}},
        {named.at("z").exp()}};
  };
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    torch::manual_seed(2);
    const auto a = torch::randn({4}).requires_grad_();
    const auto b = torch::randn({4});  // without a gradient
    const auto z = torch::randn({4}).requires_grad_();
    const auto [product, named, list] =
        recompute ? checkpoint_activations(function, std::pair(a, b), Named{{"z", z}}, 3.0)
                  : function({a, b}, {{"z", z}}, 3.0);
    EXPECT_FALSE(named.at("count").requires_grad());
    // One output does not take part in the loss.
    (product.sum() + list[0].sum()).backward();
    results.push_back({product.detach(), named.at("sum").detach(), a.grad(), z.grad(), b.grad()});
  }
  expect_same_bits(results[1], results[0]);
}

TEST(ActivationCheckpoint, InputsWithoutGradientsStillTrainParameters) {
  torch::nn::Linear linear(3, 2);
  const auto x = torch::randn({4, 3});
  linear(x).sum().backward();
  const auto expected = gradients_of(*linear);
  linear->zero_grad();
  checkpoint_activations(linear, x).sum().backward();
  expect_same_bits(gradients_of(*linear), expected);
}

TEST(ActivationCheckpoint, Nests) {
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    auto net = blocks(3, recompute);
    torch::manual_seed(5);
    const auto x = torch::randn({4, kWidth}).requires_grad_();
    const auto out = recompute ? checkpoint_activations(net, x) : net->forward(x);
    out.sum().backward();
    auto all = gradients_of(*net);
    all.push_back(x.grad());
    results.push_back(all);
  }
  expect_same_bits(results[1], results[0]);
}

TEST(ActivationCheckpoint, WithoutGradModeItIsAPlainCall) {
  const torch::NoGradGuard no_grad;
  int calls = 0;
  const auto x = torch::ones({2});
  const auto y = checkpoint_activations(
      [&](torch::Tensor t) {
        ++calls;
        t.add_(1);  // nothing will be repeated, so it may
        return t;
      },
      x);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(torch::equal(y, torch::full({2}, 2.0)));
}

TEST(ActivationCheckpoint, ARetainedGraphIsRecomputedEachTime) {
  auto net = blocks(1, true);
  const auto loss = net->forward(torch::randn({2, kWidth})).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = gradients_of(*net);
  loss.backward();
  const auto twice = gradients_of(*net);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(torch::equal(twice[i], once[i] * 2));
  expect_error(Code::kEngine, {"second time", "retain_graph"}, [&] { loss.backward(); });
}

TEST(ActivationCheckpoint, FollowsAutocast) {
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    auto net = blocks(2, recompute);
    torch::manual_seed(6);
    const auto x = torch::randn({4, kWidth}).requires_grad_();
    torch::Tensor out;
    {
      const Autocast amp(torch::kCPU, torch::kBFloat16);
      out = net->forward(x);
    }
    out.sum().backward();
    auto all = gradients_of(*net);
    all.insert(all.end(), {out.detach(), x.grad()});
    results.push_back(all);
  }
  expect_same_bits(results[1], results[0]);
}

TEST(ActivationCheckpoint, ACastThatAnEarlierUseCachedIsNotNeeded) {
  torch::nn::Linear shared(kWidth, kWidth);
  const auto x = torch::randn({2, kWidth});
  torch::Tensor out;
  {
    const Autocast amp(torch::kCPU, torch::kBFloat16);
    out = checkpoint_activations(shared, shared(x));
  }
  out.sum().backward();
  EXPECT_TRUE(shared->weight.grad().defined());
}

TEST(ActivationCheckpoint, SavesTheActivationsMemory) {
  constexpr int64_t kWide = 64;
  constexpr int64_t kRows = 256;
  constexpr int64_t kBlocks = 6;
  const Devices devices("cpu:1");
  const UseDevice home(devices[0]);
  std::vector<int64_t> peaks;
  int64_t kept = 0;
  for (const bool recompute : {false, true}) {
    auto net = blocks(kBlocks, recompute, kWide);
    const auto x = torch::randn({kRows, kWide});
    net->forward(x).sum().backward();  // gradients exist from now on
    const int64_t before = devices[0].memory().live_bytes;
    devices[0].reset_peak_memory();
    const auto out = net->forward(x);
    if (recompute) kept = devices[0].memory().live_bytes - before;
    out.sum().backward();
    peaks.push_back(devices[0].memory().peak_bytes - before);
  }
  const int64_t input_bytes = kRows * kWide * static_cast<int64_t>(sizeof(float));
  EXPECT_EQ(kept, kBlocks * input_bytes) << "each block keeps its input, and the last its output";
  // A block keeps up(x), gelu, mask and dropped (4 widths each), tanh and the sum.
  EXPECT_GT(peaks[0], kBlocks * 14 * input_bytes);
  EXPECT_LT(peaks[1], peaks[0] / 3);
}

TEST(ActivationCheckpoint, BatchNormCountsTwiceAsInPyTorch) {
  torch::nn::BatchNorm1d plain(3), recomputed(3);
  const auto x = torch::randn({6, 3});
  checkpoint_activations(recomputed, x).sum().backward();
  plain(x);
  plain(x);
  EXPECT_TRUE(torch::equal(recomputed->running_mean, plain->running_mean));
  EXPECT_EQ(recomputed->num_batches_tracked.item<int64_t>(), 2);
}

TEST(ActivationCheckpoint, ResultsMayBeChangedInPlace) {
  torch::nn::Linear linear(3, 3);
  const auto x = torch::randn({2, 3}).requires_grad_();
  auto expected = linear(x);
  expected.relu_().sum().backward();
  const auto gradient = x.grad().clone();
  x.mutable_grad().reset();
  auto out = checkpoint_activations(linear, x);
  out.relu_().sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), gradient));
}

TEST(ActivationCheckpoint, RefusesARecomputationThatDiffers) {
  torch::nn::Linear linear(4, 4), other(4, 4);
  const auto x = torch::randn({2, 4});
  const auto differing = [&](const auto& second) {
    return [&, second] {
      bool first_call = true;
      const auto function = [&first_call, &linear, second](const torch::Tensor& t) {
        return std::exchange(first_call, false) ? torch::tanh(linear(t)) : second(t);
      };
      checkpoint_activations(function, x).sum().backward();
    };
  };
  expect_error(
      Code::kTensorMismatch, {"output 0", "[2, 4]", "[2, 2]"},
      differing([&](const torch::Tensor& t) { return torch::tanh(linear(t)).slice(1, 0, 2); }));
  expect_error(Code::kTensorMismatch, {"operation 0", "TanhBackward", "SigmoidBackward"},
               differing([&](const torch::Tensor& t) { return torch::sigmoid(linear(t)); }));
  expect_error(Code::kTensorMismatch, {"parameters"},
               differing([&](const torch::Tensor& t) { return torch::tanh(other(t)); }));
  expect_error(Code::kTensorMismatch, {"operation"}, differing([&](const torch::Tensor& t) {
                 return torch::tanh(torch::tanh(linear(t)));
               }));
}

TEST(ActivationCheckpoint, RefusesWhatWouldLoseOrSpoilGradients) {
  torch::nn::Linear linear(2, 2);
  const auto x = torch::randn({2, 2});
  expect_error(Code::kUsage, {"changed an input in place"}, [&] {
    checkpoint_activations([&](torch::Tensor t) { return linear(t.add_(1)); }, x.clone());
  });
  const auto outside = linear(x);
  expect_error(Code::kUsage, {"computed outside", "argument"}, [&] {
    checkpoint_activations([&](const torch::Tensor& t) { return linear(t) * outside; }, x);
  });
  const auto input = linear(x);
  const auto out = checkpoint_activations(linear, input);
  input.detach().add_(1);
  EXPECT_THROW(out.sum().backward(), c10::Error) << "the input changed before backward";
  expect_error(Code::kEngine, {"create_graph"}, [&] {
    checkpoint_activations(linear, x).sum().backward({}, /*keep_graph=*/true,
                                                     /*create_graph=*/true);
  });
  const Devices devices("cpu:2");
  expect_error(Code::kUsage, {"gave work to"}, [&] {
    checkpoint_activations(
        [&](const torch::Tensor& t) { return devices[1].run("work", [&] { return linear(t); }); },
        x);
  });
}

TEST(ActivationCheckpoint, HooksOfParametersSeeTheGradientOnce) {
  torch::nn::Linear linear(2, 2);
  int calls = 0;
  linear->weight.register_hook([&](const torch::Tensor&) { ++calls; });
  checkpoint_activations(linear, torch::randn({2, 2})).sum().backward();
  EXPECT_EQ(calls, 1);
}

// Ranks average the same gradients; each rank's dropout is its own.
class CheckpointedDdp : public testing::TestWithParam<int> {};

Tensors train_ddp(const Communicator& comm, bool recompute, const DdpOptions& options) {
  Tensors weights;
  auto net = blocks(3, recompute);
  // Ranks are threads, which share libtorch's generator: no random weights, no dropout.
  for (auto& parameter : net->parameters()) {
    const torch::NoGradGuard no_grad;
    parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()).mul(0.37).sin());
  }
  DistributedDataParallel ddp(net, comm, options);
  for (auto& module : net->children()) module->eval();
  Sgd optimizer(ddp.parameters(), {.lr = 0.1});
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro == 0) no_sync.emplace(ddp);
      const auto x = torch::arange(4 * kWidth)
                         .view({4, kWidth})
                         .mul(0.31)
                         .add(comm.rank() + 3 * step + micro)
                         .sin();
      ddp(x).square().mean().backward();
    }
    optimizer.step({.zero_grad = true});
  }
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

TEST_P(CheckpointedDdp, SameBitsWithEveryOption) {
  for (const bool static_graph : {false, true}) {
    for (const bool find_unused : {false, true}) {
      const DdpOptions options{.first_bucket_bytes = 256,
                               .bucket_cap_bytes = 512,
                               .find_unused_parameters = find_unused,
                               .static_graph = static_graph};
      std::vector<Tensors> results(2);
      for (const bool recompute : {false, true}) {
        run_ranks(GetParam(), [&](const Communicator& comm) {
          const auto weights = train_ddp(comm, recompute, options);
          expect_same_on_all(comm, flat_weights(weights), "weights");
          if (comm.rank() == 0) results[recompute ? 1 : 0] = weights;
        });
      }
      expect_same_bits(results[1], results[0]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, CheckpointedDdp, testing::Values(1, 2, 3, 5));

TEST(ActivationCheckpoint, InsideAShardedModel) {
  for (const auto stage :
       {ShardStage::kOptimizer, ShardStage::kGradients, ShardStage::kParameters}) {
    for (const bool share : {false, true}) {
      std::vector<Tensors> results(2);
      for (const bool recompute : {false, true}) {
        run_ranks(3, [&](const Communicator& comm) {
          auto net = blocks(3, recompute);
          for (auto& parameter : net->parameters()) {
            const torch::NoGradGuard no_grad;
            parameter.copy_(
                torch::arange(parameter.numel()).view(parameter.sizes()).mul(0.37).sin());
          }
          net->eval();
          FullyShardedDataParallel fsdp(
              net, comm, {.stage = stage, .min_unit_bytes = 64, .share_on_host = share});
          Sgd optimizer(fsdp.parameters(), {.lr = 0.1});
          for (int step = 0; step < 3; ++step) {
            const auto x = torch::arange(4 * kWidth).view({4, kWidth}).mul(0.31);
            fsdp(x.add(comm.rank() + 3 * step).sin()).square().mean().backward();
            optimizer.step({.zero_grad = true});
          }
          const GatheredParameters gathered(fsdp);
          Tensors weights;
          for (const auto& parameter : net->parameters())
            weights.push_back(parameter.detach().clone());
          if (comm.rank() == 0) results[recompute ? 1 : 0] = weights;
        });
      }
      expect_same_bits(results[1], results[0]);
    }
  }
}

TEST(ActivationCheckpoint, InsideDataParallel) {
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    const Devices devices("cpu:2");
    const UseDevice home(devices[0]);
    torch::manual_seed(3);
    Block net(recompute);
    DataParallel parallel(net, devices, std::function<std::shared_ptr<BlockImpl>()>([&] {
                            return std::make_shared<BlockImpl>(recompute);
                          }));
    torch::manual_seed(4);
    const auto x = torch::randn({7, kWidth}).requires_grad_();
    parallel(x).square().sum().backward();
    auto all = gradients_of(*net);
    all.push_back(x.grad());
    results.push_back(all);
  }
  expect_same_bits(results[1], results[0]);
}

TEST(ActivationCheckpoint, InsidePipelineStages) {
  for (const auto* name : {"1f1b", "zero-bubble"}) {
    std::vector<Tensors> results;
    for (const bool recompute : {false, true}) {
      const Devices devices("cpu:2");
      auto net = blocks(4, recompute);
      const auto schedule = make_schedule(name, 2, 4);
      Pipeline pipeline(split_stages(net, cut_by_count(4, 2)), devices, schedule,
                        {.loss = [](const torch::Tensor& out, const torch::Tensor& y) {
                          return torch::mse_loss(out, y);
                        }});
      torch::manual_seed(9);
      const auto x = torch::randn({8, kWidth});
      const auto loss = pipeline.step(x, x.sin());
      auto all = gradients_of(*net);
      all.push_back(loss.detach());
      results.push_back(all);
    }
    expect_same_bits(results[1], results[0]);
  }
}

TEST(ActivationCheckpoint, WithAScaledLossAndClipping) {
  std::vector<Tensors> results;
  for (const bool recompute : {false, true}) {
    auto net = blocks(2, recompute);
    torch::manual_seed(6);
    GradScaler scaler;
    AdamW optimizer(net->parameters(), {.lr = 0.01});
    for (int step = 0; step < 3; ++step) {
      torch::Tensor loss;
      {
        const Autocast amp(torch::kCPU, torch::kBFloat16);
        loss = net->forward(torch::randn({4, kWidth})).square().mean();
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer, {.max_norm = 0.1, .zero_grad = true});
      scaler.update();
    }
    Tensors weights;
    for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach());
    results.push_back(weights);
  }
  expect_same_bits(results[1], results[0]);
}

}  // namespace
}  // namespace lockstep::test::activation_checkpoint_test
