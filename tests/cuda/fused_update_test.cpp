// The update kernels: every dtype, size and alignment against torch::optim or the CPU's loops, the
// scan of gradients before an update, and updates that are captured and replayed.

#include <gtest/gtest.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "device/capture.hpp"
#include "gpu_test.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/optim.hpp"
#include "optim_support.hpp"
#include "tensor_support.hpp"

namespace lockstep::test::fused_update_test {
namespace {

using FusedUpdate = GpuTest;

// Shorter than a pack, tails, more than a chunk, nothing; the last begins one element behind a
// boundary.
Tensors chunky_parameters(torch::Device device, torch::ScalarType dtype) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 7, 1023, 4096, 4097, 0, 20000}) {
    parameters.push_back(torch::randn({count}).to(device, dtype));
  }
  parameters.push_back(torch::randn({9001}).to(device, dtype).slice(0, 1));
  for (auto& parameter : parameters) parameter = parameter.detach().requires_grad_(true);
  return parameters;
}

std::vector<OptimizerPair> sgd_kinds() {
  return {
      sgd_pair("plain", {.lr = 0.01, .weight_decay = 0.1}),
      sgd_pair("dampening", {.lr = 0.01, .momentum = 0.9, .dampening = 0.3}),
      sgd_pair("nesterov", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true})};
}

std::vector<OptimizerPair> all_kinds() {
  auto kinds = sgd_kinds();
  kinds.push_back(adamw_pair("adamw", {.lr = 0.01}));
  kinds.push_back(adam_pair("adam", {.lr = 0.01, .weight_decay = 0.1}));
  return kinds;
}

TEST_F(FusedUpdate, EqualsTorchOnOddSizesAndMisalignedViews) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (const auto& kind : all_kinds()) {
      const SideBySide both(kind, [&] { return chunky_parameters(kGpu, dtype); });
      both.steps(0, 9);
      both.expect_equal(dtype == torch::kFloat64 ? 1e-12 : 1e-5, /*at_least=*/1);
    }
  }
}

// The formulas are one: without bias corrections, which pow() rounds, to the bit.
TEST_F(FusedUpdate, SgdHasTheBitsOfTheCpu) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (const auto& kind : sgd_kinds()) {
      const Tensors there = chunky_parameters(kGpu, dtype);
      const Tensors here = chunky_parameters(torch::kCPU, dtype);
      const auto on_gpu = kind.ours(there);
      const auto on_cpu = kind.ours(here);
      for (int step = 0; step < 5; ++step) {
        set_gradients(there, step);
        set_gradients(here, step);
        on_gpu->step();
        on_cpu->step();
      }
      for (size_t i = 0; i < here.size(); ++i) {
        EXPECT_TRUE(torch::equal(there[i].cpu(), here[i])) << kind.name << ", tensor " << i;
      }
    }
  }
}

// Half types without masters: computed in float32 and rounded, as one step of float32 would be.
TEST_F(FusedUpdate, HalfTypesAreRoundedOnce) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    for (const auto& kind : all_kinds()) {
      const Tensors low = chunky_parameters(kGpu, dtype);
      Tensors full;
      for (const auto& parameter : low) {
        full.push_back(parameter.detach().to(torch::kFloat32).requires_grad_(true));
      }
      const auto ours = kind.ours(low);
      const auto wide = kind.ours(full);
      set_gradients(low, 0);
      for (size_t i = 0; i < low.size(); ++i) {
        full[i].mutable_grad() = low[i].grad().to(torch::kFloat32);
      }
      ours->step();
      wide->step();
      for (size_t i = 0; i < low.size(); ++i) {
        EXPECT_TRUE(torch::equal(low[i], full[i].to(dtype))) << kind.name << ", tensor " << i;
      }
    }
  }
}

// 1 to 13 elements of each row: one copy of the matrix brings all of them to a device.
Tensors short_rows(const torch::Tensor& matrix) {
  Tensors rows;
  for (int64_t i = 0; i < matrix.size(0); ++i) {
    rows.push_back(matrix[i].narrow(0, 0, 1 + i % 13).detach());
  }
  return rows;
}

// A group of 18 parameters each; every second one of SGD's has momentum.
template <class Optimizer, class Defaults>
std::unique_ptr<Optimizer> in_groups(const Tensors& parameters, const Defaults& defaults) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i % 18 == 0) {
      std::unique_ptr<torch::optim::OptimizerOptions> options;
      const double lr = 0.001 * static_cast<double>(1 + i);
      if constexpr (std::is_base_of_v<torch::optim::AdamW, Optimizer>) {
        options = std::make_unique<torch::optim::AdamWOptions>(lr);
      } else {
        options = std::make_unique<torch::optim::SGDOptions>(
            torch::optim::SGDOptions(lr).momentum(i % 36 == 0 ? 0.9 : 0.0));
      }
      groups.emplace_back(Tensors{}, std::move(options));
    }
    groups.back().params().push_back(parameters[i]);
  }
  return std::make_unique<Optimizer>(groups, defaults);
}

// More tensors than the table of one update takes, in more groups than that of one preparation.
// torch's optimizer does its part on the CPU: a launch for each of its tensors and operations would
// be tens of thousands.
TEST_F(FusedUpdate, SevenHundredTensorsInFortyGroups) {
  const OptimizerPair sgd = {
      "sgd", [](const Tensors& p) { return in_groups<Sgd>(p, SgdOptions{}); },
      [](const Tensors& p) {
        return in_groups<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1));
      }};
  const OptimizerPair adamw = {
      "adamw", [](const Tensors& p) { return in_groups<AdamW>(p, AdamWOptions{}); },
      [](const Tensors& p) {
        return in_groups<torch::optim::AdamW>(p, torch::optim::AdamWOptions());
      }};
  for (const auto& pair : {sgd, adamw}) {
    torch::manual_seed(3);
    const auto here = torch::randn({700, 16});
    const auto there = here.to(kGpu);
    const Tensors expected = short_rows(here);
    const Tensors actual = short_rows(there);
    for (const auto& parameters : {expected, actual}) {
      for (const auto& parameter : parameters) parameter.requires_grad_(true);
    }
    const auto ours = pair.ours(actual);
    const auto theirs = pair.theirs(expected);
    for (int step = 0; step < 3; ++step) {
      const auto gradients = torch::randn({700, 16});
      const Tensors our_gradients = short_rows(gradients.to(kGpu));
      const Tensors their_gradients = short_rows(gradients);
      for (size_t i = 0; i < actual.size(); ++i) {
        actual[i].mutable_grad() = our_gradients[i];
        expected[i].mutable_grad() = their_gradients[i];
      }
      fused(*ours).step_fused({}, {.max_norm = 3.0});
      torch::nn::utils::clip_grad_norm_(expected, 3.0);
      theirs->step();
    }
    expect_near(short_rows(there.cpu()), expected, 1e-5, pair.name, /*at_least=*/1);
  }
}

TEST_F(FusedUpdate, ADroppedStateCountsFromTheBeginning) {
  const SideBySide both(adamw_pair("adamw", {}),
                        [] { return Tensors{torch::ones({5}, kGpu).requires_grad_(true)}; });
  both.steps(0, 2);
  both.ours->state().clear();
  both.theirs->state().clear();
  both.steps(3, 5);
  both.expect_equal(1e-6, /*at_least=*/1);
}

// The scan: a gradient that is not finite skips the step, and the norm is the same every time.

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST_F(FusedUpdate, ThousandsOfGradientsAreScannedTogether) {
  const auto weights = torch::zeros({2300, 4}, kGpu);
  const auto gradients = torch::ones({2300, 4}, kGpu);
  Tensors parameters;
  for (int64_t i = 0; i < 2300; ++i) {
    parameters.push_back(weights[i].narrow(0, 0, 3).detach().requires_grad_(true));
    parameters.back().mutable_grad() = gradients[i].narrow(0, 0, 3).detach();
  }
  Sgd optimizer(parameters, {.lr = 1});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, kGpu));
  scaler.step(optimizer, {.max_norm = 1.0});
  scaler.update();
  const double expected = -1 / std::sqrt(3.0 * 2300);
  EXPECT_NEAR(parameters[2299][2].item<double>(), expected, 1e-6);
  parameters[2250].mutable_grad()[1] = kNan;
  parameters[2290].mutable_grad()[0] = kInfinity;
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.skipped_steps().at(0).parameter, "parameter 2250 of group 0");
}

// One bad element, wherever it stands, stops the whole step, and the parameter is named.
TEST_F(FusedUpdate, ABadElementAnywhereSkipsTheStep) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
    const Tensors parameters = chunky_parameters(kGpu, dtype);
    Tensors before;
    for (const auto& parameter : parameters) before.push_back(parameter.detach().clone());
    AdamW optimizer(parameters);
    GradScaler scaler;
    scaler.scale(torch::ones({}, kGpu));
    size_t skips = 0;
    for (const size_t tensor : {size_t{0}, size_t{1}, size_t{4}, size_t{6}, size_t{7}}) {
      const int64_t count = parameters[tensor].numel();
      for (const int64_t at : {int64_t{0}, count / 2, count - 1}) {
        for (const double bad : {kInfinity, -kInfinity, kNan}) {
          set_gradients(parameters, 0);
          parameters[tensor].mutable_grad()[at] = bad;
          scaler.step(optimizer);
          scaler.update();
          ASSERT_EQ(scaler.skipped_steps().size(), ++skips);
          EXPECT_EQ(scaler.skipped_steps().back().parameter,
                    "parameter " + std::to_string(tensor) + " of group 0");
          EXPECT_EQ(scaler.skipped_steps().back().step, static_cast<int64_t>(skips));
        }
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(torch::equal(parameters[i], before[i])) << i;
    }
  }
}

TEST_F(FusedUpdate, LargeDoublesAreFiniteThoughTheirSquaresAreNot) {
  const auto weight = torch::zeros({5}, torch::device(kGpu).dtype(torch::kFloat64));
  const auto parameter = weight.requires_grad_(true);
  Sgd optimizer({parameter}, {.lr = 1e-200});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, kGpu));
  parameter.mutable_grad() = torch::full_like(parameter, 1e200);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(scaler.skipped_steps().empty());
  EXPECT_NEAR(parameter[3].item<double>(), -1, 1e-12);
}

TEST_F(FusedUpdate, TheSameNormEveryTime) {
  Tensors results;
  for (int run = 0; run < 3; ++run) {
    const Tensors parameters = {torch::zeros({3'000'017}, kGpu).requires_grad_(true)};
    Sgd optimizer(parameters, {.lr = 1});
    set_gradients(parameters, 0);
    optimizer.step({.max_norm = 1.0});
    results.push_back(parameters[0].detach());
  }
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_TRUE(torch::equal(results[0], results[2]));
  EXPECT_NEAR(results[0].norm().item<double>(), 1, 1e-5);
}

// Captured into a CUDA graph and replayed, updates have the bits of eager steps.

using torch::optim::Optimizer;

// A net's step with a scaler, as a user would write it.
struct Trained {
  Trained(bool adamw, torch::Tensor input) : x(std::move(input)) {
    torch::manual_seed(5);
    net = torch::nn::Sequential(torch::nn::Linear(13, 33), torch::nn::Tanh(),
                                torch::nn::Linear(33, 5));
    net->to(kGpu);
    scaler.name_parameters(*net);
    if (adamw) {
      optimizer = std::make_unique<AdamW>(net->parameters(), AdamWOptions{.lr = 0.01});
    } else {
      optimizer = std::make_unique<Sgd>(net->parameters(),
                                        SgdOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.1});
    }
  }

  void step() {
    scaler.scale(net->forward(x).square().mean()).backward();
    scaler.step(*optimizer, {.max_norm = 0.5, .zero_grad = true});
    scaler.update();
  }

  torch::Tensor weights() const {
    return torch::nn::utils::parameters_to_vector(net->parameters()).detach().cpu();
  }

  torch::Tensor x;
  torch::nn::Sequential net;
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler{{.growth_interval = 3}};
};

/// The least that a captured step is: one graph.
class OneGraph final : public Capture {
 public:
  explicit OneGraph(c10::cuda::CUDAStream on) : on_(on) {}

  template <class Step>
  void capture(Step&& step) {
    const c10::cuda::CUDAStreamGuard guard(on_);
    // As CapturedStep does: memory that is not the graph's own may be allocated meanwhile.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeRelaxed);
    {
      const Current current(*this);
      step();
    }
    graph_.capture_end();
  }
  void replay() {
    const c10::cuda::CUDAStreamGuard guard(on_);
    for (const auto& work : before_) work();
    graph_.replay();
    for (const auto& work : after_) work();
  }

  c10::Stream stream() const override { return on_.unwrap(); }
  void before_replay(std::function<void()> work) override { before_.push_back(std::move(work)); }
  void after_replay(std::function<void()> work) override { after_.push_back(std::move(work)); }
  void between_graphs(std::function<void()>) override { FAIL() << "nothing here communicates"; }
  void if_dropped(std::function<void()>) override {}
  void keep(std::shared_ptr<const void> what) override { kept_.push_back(std::move(what)); }

 private:
  c10::cuda::CUDAStream on_;
  std::vector<std::function<void()>> before_;
  std::vector<std::function<void()>> after_;
  std::vector<std::shared_ptr<const void>> kept_;  // outlives the graph
  at::cuda::CUDAGraph graph_;
};

void set_lr(Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

// Fifth step: infinite input. Seventh: another learning rate.
template <class Step>
void drive(Trained& trained, int from, int to, Step&& step) {
  for (int i = from; i <= to; ++i) {
    if (i == 5) trained.x.fill_(std::numeric_limits<double>::infinity());
    if (i == 6) trained.x.fill_(0.25);
    if (i == 7) set_lr(*trained.optimizer, 0.05);
    step();
  }
}

TEST_F(FusedUpdate, ReplaysEqualEagerStepsToTheBit) {
  const auto stream = c10::cuda::getStreamFromPool();
  for (const bool adamw : {false, true}) {
    const c10::cuda::CUDAStreamGuard guard(stream);
    torch::manual_seed(1);
    const auto x = torch::randn({8, 13}).to(kGpu);
    Trained eager(adamw, x.clone());
    Trained captured(adamw, x.clone());
    drive(eager, 1, 10, [&] { eager.step(); });
    drive(captured, 1, 3, [&] { captured.step(); });
    OneGraph graph(stream);
    graph.capture([&] { captured.step(); });
    drive(captured, 4, 10, [&] { graph.replay(); });
    EXPECT_TRUE(torch::equal(captured.weights(), eager.weights())) << (adamw ? "adamw" : "sgd");
    EXPECT_EQ(captured.scaler.get_scale(), eager.scaler.get_scale());
    EXPECT_EQ(captured.scaler.state_dict()->growth_tracker,
              eager.scaler.state_dict()->growth_tracker);
    ASSERT_EQ(captured.scaler.skipped_steps().size(), 1U);
    ASSERT_EQ(eager.scaler.skipped_steps().size(), 1U);
    EXPECT_EQ(captured.scaler.skipped_steps()[0].step, 5);
    EXPECT_EQ(eager.scaler.skipped_steps()[0].step, 5);
    EXPECT_EQ(captured.scaler.skipped_steps()[0].parameter,
              eager.scaler.skipped_steps()[0].parameter);
    EXPECT_EQ(captured.scaler.skipped_steps()[0].scale_after,
              eager.scaler.skipped_steps()[0].scale_after);
    EXPECT_EQ(saved(*captured.optimizer).size(), saved(*eager.optimizer).size());
  }
}

TEST_F(FusedUpdate, AReplayRefusesWhatOnlyANewCaptureCanDo) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  Trained trained(/*adamw=*/false, torch::ones({8, 13}, kGpu));
  trained.step();
  OneGraph graph(stream);
  graph.capture([&] { trained.step(); });
  auto& group = trained.optimizer->param_groups()[0];
  static_cast<torch::optim::SGDOptions&>(group.options()).momentum(0);
  expect_error(Code::kCapture, {"momentum of group 0", "new CapturedStep"},
               [&] { graph.replay(); });
}

TEST_F(FusedUpdate, AFirstStepInsideACaptureIsRefused) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const Tensors parameters = {torch::ones({5}, kGpu).requires_grad_(true)};
  set_gradients(parameters, 0);
  OneGraph graph(stream);
  for (const auto& kind : all_kinds()) {
    const auto optimizer = kind.ours(parameters);
    const Capture::Current current(graph);  // nothing is recorded: nothing may come so far
    expect_error(Code::kCapture, {"first step", "warmup"}, [&] { optimizer->step(); });
    GradScaler scaler;
    expect_error(Code::kCapture, {"first loss", "warmup"},
                 [&] { scaler.scale(torch::ones({}, kGpu)); });
  }
}

}  // namespace
}  // namespace lockstep::test::fused_update_test

#endif
