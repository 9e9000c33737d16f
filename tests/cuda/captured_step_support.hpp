#pragma once

// The models that captured steps train, and the results to compare.

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <utility>
#include <vector>

#include "gpu_test.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/optim.hpp"

namespace lockstep::test {

using CudaCapture = GpuTest;

constexpr int kSteps = 20;

inline torch::nn::Sequential make_net(double dropout = 0) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::ReLU());
  if (dropout > 0) net->push_back(torch::nn::Dropout(dropout));
  net->push_back(torch::nn::Linear(64, 64));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(64, 8));
  net->to(kGpu);
  return net;
}

struct Rows {
  torch::Tensor x;
  torch::Tensor y;
};

inline Rows rows_of_step(int step, int64_t rows = 16) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step) + 100);
  return {torch::randn({rows, 32}, generator).to(kGpu),
          torch::randn({rows, 8}, generator).to(kGpu)};
}

/// The losses of the first `count` steps. `rows` makes each step's and may change what it finds.
inline std::vector<float> losses_of(
    CapturedStep& step, int count,
    const std::function<Rows(int)>& rows = [](int i) { return rows_of_step(i); }) {
  std::vector<float> losses;
  for (int i = 0; i < count; ++i) {
    const auto [x, y] = rows(i);
    losses.push_back(step(x, y).item<float>());
  }
  return losses;
}

/// The results of a run: every loss, and the weights.
struct Result {
  std::vector<float> losses;
  std::vector<torch::Tensor> weights;
};

inline Result result_of(std::vector<float> losses, const torch::nn::Module& net) {
  Result result{std::move(losses), {}};
  for (const auto& weight : net.parameters()) result.weights.push_back(weight.detach().clone());
  return result;
}

inline void expect_same_bits(const Result& captured, const Result& eager) {
  EXPECT_EQ(captured.losses, eager.losses);
  ASSERT_EQ(captured.weights.size(), eager.weights.size());
  for (size_t i = 0; i < eager.weights.size(); ++i) {
    EXPECT_TRUE(torch::equal(captured.weights[i], eager.weights[i])) << "weight " << i;
  }
}

/// A net with its optimizer: the step that most tests capture.
struct SgdNet {
  explicit SgdNet(const SgdOptions& options = {.lr = 0.1}, double dropout = 0)
      : net(make_net(dropout)), optimizer(net->parameters(), options) {}

  /// Forward and backward.
  torch::Tensor loss(const torch::Tensor& x, const torch::Tensor& y) {
    const auto value = torch::mse_loss(net->forward(x), y);
    value.backward();
    return value;
  }
  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& y) {
    const auto value = loss(x, y);
    optimizer.step({.zero_grad = true});
    return value;
  }
  CapturedStep captured(const CaptureOptions& options) {
    return CapturedStep(
        [this](const torch::Tensor& x, const torch::Tensor& y) { return step(x, y); }, options);
  }

  torch::nn::Sequential net;
  Sgd optimizer;
};

/// Trains with momentum, through graphs or without.
inline Result train_sgd(bool enabled, double dropout = 0) {
  SgdNet trained({.lr = 0.1, .momentum = 0.9}, dropout);
  CapturedStep step = trained.captured({.enabled = enabled});
  torch::manual_seed(11);
  auto losses = losses_of(step, kSteps);
  EXPECT_EQ(step.replayed(), enabled) << step.why_not();
  EXPECT_EQ(step.stats().captures, enabled ? 1 : 0);
  EXPECT_EQ(step.stats().replays, enabled ? kSteps - 3 : 0);
  EXPECT_EQ(step.stats().graphs, enabled ? 1 : 0);
  return result_of(std::move(losses), *trained.net);
}

}  // namespace lockstep::test
