// MasterWeights on a GPU: one kernel updates the float32 weight and writes the rounded parameter.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "gpu_test.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/sgd.hpp"
#include "master_weights_support.hpp"

namespace lockstep::test {
namespace {

using MasterWeightsCuda = GpuTest;

// Odd sizes, and one matrix of more than a chunk of the kernel.
torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(
      torch::nn::Linear(7, 1023), torch::nn::Tanh(),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions(std::vector<int64_t>{1023})),
      torch::nn::Linear(1023, 5));
}

torch::nn::Sequential make_gpu_net() {
  auto net = make_net();
  net->to(kGpu);
  return net;
}

TEST_F(MasterWeightsCuda, MastersWalkAsFloat32Does) {
  check_masters_walk_as_float32(make_gpu_net);
}

TEST_F(MasterWeightsCuda, AScalerAcceptsHalfGradientsAndSkipsByName) {
  for (const auto& [name, make] : master_optimizers()) {
    SCOPED_TRACE(name);
    const LowAndFull both(make_gpu_net, torch::kHalf, make);
    GradScaler scaler;
    GradScaler full_scaler;
    scaler.name_parameters(*both.low);
    scaler.scale(torch::ones({}, kGpu));
    full_scaler.scale(torch::ones({}, kGpu));
    for (int step = 1; step <= 4; ++step) {
      both.set_gradients(step, 65536 * 1e-8);
      if (step == 2) {
        both.low->parameters()[4].mutable_grad()[1][1] = std::numeric_limits<double>::infinity();
      }
      both.copy_gradients();
      scaler.step(*both.ours, {.zero_grad = true});
      full_scaler.step(*both.expected, {.zero_grad = true});
      scaler.update();
      full_scaler.update();
    }
    both.expect_masters_as_full();
    ASSERT_EQ(scaler.skipped_steps().size(), 1U);
    EXPECT_EQ(scaler.skipped_steps()[0].parameter, "3.weight");
  }
}

TEST_F(MasterWeightsCuda, ASavedOptimizerGoesOnWithTheSameBitsAndAModelMayMove) {
  for (const auto& [name, make] : master_optimizers()) {
    SCOPED_TRACE(name);
    check_saved_optimizer_goes_on(make_net, make, kGpu);
  }
}

// Losses of a net trained under Autocast with float32 weights, and with masters.
TEST_F(MasterWeightsCuda, TrainsAsAutocastDoes) {
  std::vector<float> losses[2];
  for (const bool with_masters : {false, true}) {
    auto net = make_gpu_net();
    std::optional<MasterWeights> masters;
    if (with_masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kHalf});
    Sgd optimizer(net->parameters(), {.lr = 0.01, .masters = masters});
    GradScaler scaler;
    const auto x = torch::arange(16 * 7).view({16, 7}).mul(0.37).sin().to(kGpu);
    const auto y = torch::arange(16 * 5).view({16, 5}).mul(0.11).cos().to(kGpu);
    for (int step = 0; step < 30; ++step) {
      torch::Tensor loss;
      {
        const Autocast amp(kGpu, torch::kHalf);
        loss = torch::mse_loss(net->forward(x), y);
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer, {.zero_grad = true});
      scaler.update();
      losses[with_masters ? 1 : 0].push_back(loss.item<float>());
    }
  }
  EXPECT_LT(losses[0].back(), losses[0].front());
  for (size_t step = 0; step < losses[0].size(); ++step) {
    EXPECT_NEAR(losses[1][step], losses[0][step], 5e-3 * losses[0][0]) << "step " << step;
  }
}

}  // namespace
}  // namespace lockstep::test
