// Autocast, GradScaler and MasterWeights on a GPU: PyTorch's numbers, skipped steps by name, and a
// host that never waits.

#include <gtest/gtest.h>
#include <torch/torch.h>
#if LOCKSTEP_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

#include <limits>

#include "gpu_test.hpp"
#include "grad_scaler_golden.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/optim.hpp"
#include "master_weights_support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::precision_cuda_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class CudaPrecision : public GpuTest {
 protected:
  const torch::Device gpu = kGpu;
};

torch::nn::Sequential make_net(torch::Device device) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::Tanh(), torch::nn::Linear(64, 8));
  net->to(device);
  return net;
}

MakeOptimizer torch_sgd() {
  return [](std::vector<torch::Tensor> parameters, double lr) {
    return std::make_unique<torch::optim::SGD>(parameters, lr);
  };
}

MakeOptimizer lockstep_sgd() {
  return [](std::vector<torch::Tensor> parameters, double lr) {
    return std::make_unique<Sgd>(parameters, SgdOptions{.lr = lr});
  };
}

MakeOptimizer lockstep_adamw() {
  return [](std::vector<torch::Tensor> parameters, double lr) {
    return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = lr});
  };
}

TEST_F(CudaPrecision, AutocastLowersProductsAndKeepsLossesAsPyTorchDoesOnAGpu) {
  const auto x = torch::randn({8, 8}, gpu);
  const auto product_dtype = [&] { return torch::mm(x, x).scalar_type(); };
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const Autocast amp(gpu, dtype);
    EXPECT_EQ(product_dtype(), dtype);
    EXPECT_EQ(torch::mm(x, x).softmax(1).scalar_type(), torch::kFloat);
    EXPECT_EQ(torch::mse_loss(torch::mm(x, x), x).scalar_type(), torch::kFloat);
    const auto on_cpu = torch::ones({4, 4});
    EXPECT_EQ(torch::mm(on_cpu, on_cpu).scalar_type(), torch::kFloat) << "a guard is of one kind";
    const Autocast off(gpu, dtype, false);
    EXPECT_EQ(product_dtype(), torch::kFloat);
  }
  EXPECT_EQ(product_dtype(), torch::kFloat);
}

TEST_F(CudaPrecision, GoesWherePyTorchsGoes) {
  const auto golden = golden_scaler();
  for (const auto& make : {torch_sgd(), lockstep_sgd()}) {
    for (const auto& one : golden.at("cases")) {
      play_golden_case(one, golden.at("learning_rate").get<double>(), gpu, make);
    }
  }
}

// [step] losses.
std::vector<float> train(torch::Device gpu, std::optional<torch::ScalarType> low,
                         const MakeOptimizer& make) {
  auto net = make_net(gpu);
  const auto optimizer = make(net->parameters(), 0.05);
  GradScaler scaler({.enabled = low == torch::kHalf});
  const auto x = torch::arange(16 * 32).view({16, 32}).mul(0.37).sin().to(gpu);
  const auto y = torch::arange(16 * 8).view({16, 8}).mul(0.11).cos().to(gpu);
  std::vector<float> losses;
  for (int step = 0; step < 40; ++step) {
    torch::Tensor loss;
    {
      const Autocast amp(gpu, low.value_or(torch::kHalf), low.has_value());
      loss = torch::mse_loss(net->forward(x), y);
    }
    optimizer->zero_grad();
    scaler.scale(loss).backward();
    scaler.step(*optimizer);
    scaler.update();
    losses.push_back(loss.item<float>());
  }
  EXPECT_TRUE(scaler.skipped_steps().empty());
  return losses;
}

TEST_F(CudaPrecision, LowerPrecisionTrainsAsFullPrecisionDoes) {
  for (const auto& make : {torch_sgd(), lockstep_sgd(), lockstep_adamw()}) {
    const auto expected = train(gpu, std::nullopt, make);
    EXPECT_LT(expected.back(), expected.front());
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      const auto losses = train(gpu, dtype, make);
      const double tolerance = dtype == torch::kHalf ? 5e-3 : 3e-2;
      for (size_t step = 0; step < losses.size(); ++step) {
        EXPECT_NEAR(losses[step], expected[step], tolerance * expected[0])
            << toString(dtype) << ", step " << step;
      }
    }
  }
}

TEST_F(CudaPrecision, APlantedOverflowSkipsThatStepAndIsNamed) {
  for (const auto& make : {torch_sgd(), lockstep_sgd(), lockstep_adamw()}) {
    std::vector<SkippedStep> told;
    GradScaler scaler({.on_skip = [&](const SkippedStep& skipped) { told.push_back(skipped); }});
    auto net = make_net(gpu);
    scaler.name_parameters(*net);
    const auto optimizer = make(net->parameters(), 0.05);
    for (int step = 1; step <= 6; ++step) {
      const auto before = torch::nn::utils::parameters_to_vector(net->parameters()).clone();
      optimizer->zero_grad();
      scaler.scale(net->forward(torch::ones({4, 32}, gpu)).square().mean()).backward();
      if (step == 4) {
        net->named_parameters()["2.weight"].mutable_grad()[1][1] = kInfinity;
        net->named_parameters()["2.bias"].mutable_grad()[0] = -kInfinity;
      }
      scaler.step(*optimizer);
      scaler.update();
      const auto after = torch::nn::utils::parameters_to_vector(net->parameters());
      EXPECT_EQ(torch::equal(after, before), step == 4) << "step " << step;
    }
    ASSERT_EQ(scaler.skipped_steps().size(), 1U);
    ASSERT_EQ(told.size(), 1U);
    EXPECT_EQ(told[0].step, 4);
    EXPECT_EQ(told[0].parameter, "2.weight");
    EXPECT_EQ(told[0].scale_before, 65536);
    EXPECT_EQ(told[0].scale_after, 32768);
  }
}

#if LOCKSTEP_CUDA
/// Guard: whatever makes the host wait for the GPU throws.
class NoWaiting {
 public:
  NoWaiting() { set(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { set(c10::cuda::SyncDebugMode::L_DISABLED); }
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;

 private:
  static void set(c10::cuda::SyncDebugMode mode) {
    c10::cuda::warning_state().set_sync_debug_mode(mode);
  }
};

TEST_F(CudaPrecision, ALockstepOptimizerNeverMakesTheHostWait) {
  for (const auto& make : {lockstep_sgd(), lockstep_adamw()}) {
    GradScaler scaler({.growth_interval = 2});
    auto net = make_net(gpu);
    const auto optimizer = make(net->parameters(), 0.05);
    const auto x = torch::ones({4, 32}, gpu);
    for (int step = 1; step <= 8; ++step) {
      const auto loss = net->forward(x).square().mean() * (step == 5 ? kInfinity : 1.0);
      const NoWaiting no_waiting;
      scaler.scale(loss).backward();
      if (step % 3 == 0) scaler.unscale_(*optimizer);
      scaler.step(*optimizer, {.max_norm = 1.0, .zero_grad = true});
      scaler.update();
    }
    ASSERT_EQ(scaler.skipped_steps().size(), 1U);
    EXPECT_EQ(scaler.skipped_steps()[0].step, 5);
    EXPECT_EQ(scaler.get_scale(), 65536 * 4) << "grown after 2 and 4, halved by 5, grown after 7";
  }
}

TEST_F(CudaPrecision, ATorchOptimizerMakesTheHostWaitAsInPyTorch) {
  GradScaler scaler;
  auto net = make_net(gpu);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  scaler.scale(net->forward(torch::ones({4, 32}, gpu)).mean()).backward();
  const NoWaiting no_waiting;
  EXPECT_THROW(scaler.step(optimizer), c10::Error);
}
#endif

TEST_F(CudaPrecision, TheScaleServesLossesOfAnyDevice) {
  for (const bool gpu_first : {true, false}) {
    GradScaler scaler({.init_scale = 8});
    const auto on_gpu = torch::ones({3}, gpu).requires_grad_();
    const auto on_cpu = torch::ones({3}).requires_grad_();
    torch::optim::SGD optimizer({on_gpu, on_cpu}, 0.5);
    const auto losses = gpu_first ? std::vector{on_gpu.sum(), on_cpu.sum()}
                                  : std::vector{on_cpu.sum(), on_gpu.sum()};
    for (const auto& loss : losses) scaler.scale(loss).backward();
    EXPECT_TRUE(torch::equal(on_cpu.grad(), torch::full({3}, 8.0)));
    scaler.step(optimizer);
    scaler.update();
    for (const auto& weight : {on_gpu, on_cpu}) {
      EXPECT_TRUE(torch::equal(weight.detach().cpu(), torch::full({3}, 0.5)));
    }
    on_gpu.mutable_grad()[1] = kInfinity;
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_EQ(scaler.skipped_steps().at(0).parameter, "parameter 0 of group 0");
  }
}

// MasterWeights: one kernel updates the float32 weight and writes the rounded parameter.

using MasterWeightsCuda = GpuTest;

// Odd sizes, and one matrix of more than a chunk of the kernel.
torch::nn::Sequential make_odd_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(
      torch::nn::Linear(7, 1023), torch::nn::Tanh(),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions(std::vector<int64_t>{1023})),
      torch::nn::Linear(1023, 5));
}

torch::nn::Sequential make_gpu_net() {
  auto net = make_odd_net();
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
    check_saved_optimizer_goes_on(make_odd_net, make, kGpu);
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
}  // namespace lockstep::test::precision_cuda_test
