// MasterWeights on a GPU: one kernel updates the float32 weight and writes the rounded parameter.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "lockstep/adamw.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

using torch::optim::Optimizer;

class MasterWeightsCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
  const torch::Device gpu{torch::kCUDA, 0};
};

// Odd sizes, and one matrix of more than a chunk of the kernel.
torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(
      torch::nn::Linear(7, 1023), torch::nn::Tanh(),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions(std::vector<int64_t>{1023})),
      torch::nn::Linear(1023, 5));
}

void set_gradients(const std::vector<torch::Tensor>& parameters, int step, double scale = 1) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  for (const auto& parameter : parameters) {
    parameter.mutable_grad() =
        (torch::randn(parameter.sizes()) * scale).to(parameter.device(), parameter.scalar_type());
  }
}

void copy_gradients(const std::vector<torch::Tensor>& from, const std::vector<torch::Tensor>& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    // A copy always: clipping writes to gradients that are kept.
    to[i].mutable_grad() =
        from[i].grad().to(torch::kFloat32, /*non_blocking=*/false, /*copy=*/true);
  }
}

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<torch::Tensor>,
                                                      std::optional<MasterWeights>)>;

std::vector<std::pair<std::string, Make>> makers() {
  return {{"sgd",
           [](auto parameters, auto masters) {
             return std::make_unique<Sgd>(
                 parameters, SgdOptions{.lr = 0.01, .momentum = 0.9, .masters = masters});
           }},
          {"adamw", [](auto parameters, auto masters) {
             return std::make_unique<AdamW>(parameters,
                                            AdamWOptions{.lr = 0.01, .masters = masters});
           }}};
}

FusedOptimizer& fused(Optimizer& optimizer) {
  return dynamic_cast<FusedOptimizer&>(optimizer);
}

TEST_F(MasterWeightsCuda, MastersWalkAsFloat32Does) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& [name, make] : makers()) {
      SCOPED_TRACE(name);
      auto low = make_net();
      auto full = make_net();
      low->to(gpu);
      full->to(gpu);
      const MasterWeights masters(*low, {.dtype = dtype});
      const auto ours = make(low->parameters(), masters);
      const auto expected = make(full->parameters(), std::nullopt);
      for (int step = 0; step < 10; ++step) {
        set_gradients(low->parameters(), step);
        copy_gradients(low->parameters(), full->parameters());
        const StepExtras extras = {.max_norm = step % 3 == 0 ? std::optional(1.0) : std::nullopt,
                                   .zero_grad = step % 2 == 0};
        fused(*ours).step_fused({}, extras);
        fused(*expected).step_fused({}, extras);
        EXPECT_EQ(low->parameters()[0].grad().defined(), step % 2 != 0);
      }
      for (size_t i = 0; i < full->parameters().size(); ++i) {
        const auto parameter = low->parameters()[i];
        EXPECT_TRUE(torch::equal(masters.of(parameter), full->parameters()[i])) << i;
        EXPECT_TRUE(torch::equal(parameter, masters.of(parameter).to(parameter.dtype()))) << i;
      }
    }
  }
}

TEST_F(MasterWeightsCuda, AScalerAcceptsHalfGradientsAndSkipsByName) {
  for (const auto& [name, make] : makers()) {
    SCOPED_TRACE(name);
    auto low = make_net();
    auto full = make_net();
    low->to(gpu);
    full->to(gpu);
    const MasterWeights masters(*low, {.dtype = torch::kHalf});
    const auto ours = make(low->parameters(), masters);
    const auto expected = make(full->parameters(), std::nullopt);
    GradScaler scaler;
    GradScaler full_scaler;
    scaler.name_parameters(*low);
    scaler.scale(torch::ones({}, gpu));
    full_scaler.scale(torch::ones({}, gpu));
    for (int step = 1; step <= 4; ++step) {
      set_gradients(low->parameters(), step, 65536 * 1e-8);
      if (step == 2) {
        low->parameters()[4].mutable_grad()[1][1] = std::numeric_limits<double>::infinity();
      }
      copy_gradients(low->parameters(), full->parameters());
      scaler.step(*ours, {.zero_grad = true});
      full_scaler.step(*expected, {.zero_grad = true});
      scaler.update();
      full_scaler.update();
    }
    for (size_t i = 0; i < full->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(masters.of(low->parameters()[i]), full->parameters()[i])) << i;
    }
    ASSERT_EQ(scaler.skipped_steps().size(), 1U);
    EXPECT_EQ(scaler.skipped_steps()[0].parameter, "3.weight");
  }
}

TEST_F(MasterWeightsCuda, ASavedOptimizerGoesOnWithTheSameBitsAndAModelMayMove) {
  for (const auto& [name, make] : makers()) {
    SCOPED_TRACE(name);
    auto whole = make_net();
    auto resumed = make_net();
    const MasterWeights whole_masters(*whole);
    const MasterWeights resumed_masters(*resumed);
    whole->to(gpu);  // the masters follow
    resumed->to(gpu);
    const auto first = make(whole->parameters(), whole_masters);
    const auto second = make(resumed->parameters(), resumed_masters);
    for (int step = 0; step < 8; ++step) {
      if (step == 4) {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < whole->parameters().size(); ++i) {
          resumed->parameters()[i].copy_(whole->parameters()[i]);
        }
        load(*second, saved(*first));
      }
      set_gradients(whole->parameters(), step);
      first->step();
      if (step < 4) continue;
      set_gradients(resumed->parameters(), step);
      second->step();
    }
    for (size_t i = 0; i < whole->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(resumed_masters.of(resumed->parameters()[i]),
                               whole_masters.of(whole->parameters()[i])))
          << i;
    }
  }
}

// Losses of a net trained under Autocast with float32 weights, and with masters.
TEST_F(MasterWeightsCuda, TrainsAsAutocastDoes) {
  std::vector<float> losses[2];
  for (const bool with_masters : {false, true}) {
    auto net = make_net();
    net->to(gpu);
    std::optional<MasterWeights> masters;
    if (with_masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kHalf});
    Sgd optimizer(net->parameters(), {.lr = 0.01, .masters = masters});
    GradScaler scaler;
    const auto x = torch::arange(16 * 7).view({16, 7}).mul(0.37).sin().to(gpu);
    const auto y = torch::arange(16 * 5).view({16, 5}).mul(0.11).cos().to(gpu);
    for (int step = 0; step < 30; ++step) {
      torch::Tensor loss;
      {
        const Autocast amp(gpu, torch::kHalf);
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
