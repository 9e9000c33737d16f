// The update kernels: every dtype, size and alignment against torch::optim or the CPU's loops,
// steps that are skipped on the device, and steps that are captured and replayed.

#include <gtest/gtest.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "device/capture.hpp"
#include "lockstep/adamw.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

using torch::optim::Optimizer;
using Tensors = std::vector<torch::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class FusedUpdate : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
  const torch::Device gpu{torch::kCUDA, 0};
};

// Shorter than a pack, tails, more than a chunk, nothing; the last begins one element behind a
// boundary.
Tensors make_parameters(torch::Device device, torch::ScalarType dtype) {
  torch::manual_seed(11);
  Tensors parameters;
  for (const int64_t count : {1, 7, 1023, 4096, 4097, 0, 20000}) {
    parameters.push_back(torch::randn({count}).to(device, dtype));
  }
  parameters.push_back(torch::randn({9001}).to(device, dtype).slice(0, 1));
  for (auto& parameter : parameters) parameter = parameter.detach().requires_grad_(true);
  return parameters;
}

// The same on every device; the last gradient lies as its parameter does.
void set_gradients(const Tensors& parameters, int step, double scale = 1) {
  torch::manual_seed(1000 + static_cast<uint64_t>(step));
  for (const auto& parameter : parameters) {
    const auto values = torch::cat({torch::zeros({1}), torch::randn(parameter.sizes()) * scale});
    const bool shifted = parameter.storage_offset() != 0;
    const auto there = values.to(parameter.device(), parameter.scalar_type());
    parameter.mutable_grad() = shifted ? there.slice(0, 1) : there.slice(0, 1).clone();
  }
}

struct Kind {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> ours;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> theirs;
};

Kind sgd_kind(const std::string& name, const SgdOptions& options) {
  return {name, [=](const Tensors& p) { return std::make_unique<Sgd>(p, options); },
          [=](const Tensors& p) {
            return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(options.lr)
                                                              .momentum(options.momentum)
                                                              .dampening(options.dampening)
                                                              .weight_decay(options.weight_decay)
                                                              .nesterov(options.nesterov));
          }};
}

std::vector<Kind> kinds() {
  return {
      sgd_kind("plain", {.lr = 0.01, .weight_decay = 0.1}),
      sgd_kind("dampening", {.lr = 0.01, .momentum = 0.9, .dampening = 0.3}),
      sgd_kind("nesterov", {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}),
      {"adamw",
       [](const Tensors& p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.01}); },
       [](const Tensors& p) {
         return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01));
       }}};
}

FusedOptimizer& fused(Optimizer& optimizer) {
  return dynamic_cast<FusedOptimizer&>(optimizer);
}

void expect_near(const Tensors& actual, const Tensors& expected, double tolerance,
                 const std::string& what) {
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i].numel() == 0) continue;
    const auto theirs = expected[i].detach().to(actual[i].device(), torch::kDouble);
    const double difference =
        (actual[i].detach().to(torch::kDouble) - theirs).abs().max().item<double>();
    EXPECT_LE(difference, tolerance * std::max(1.0, theirs.abs().max().item<double>()))
        << what << ", tensor " << i;
  }
}

TEST_F(FusedUpdate, EqualsTorchOnOddSizesAndMisalignedViews) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (const Kind& kind : kinds()) {
      const Tensors actual = make_parameters(gpu, dtype);
      const Tensors expected = make_parameters(gpu, dtype);
      const auto ours = kind.ours(actual);
      const auto theirs = kind.theirs(expected);
      for (int step = 0; step < 10; ++step) {
        set_gradients(actual, step);
        set_gradients(expected, step);
        ours->step();
        theirs->step();
      }
      expect_near(actual, expected, dtype == torch::kFloat64 ? 1e-12 : 1e-5, kind.name);
    }
  }
}

// The formulas are one: without bias corrections, which pow() rounds, to the bit.
TEST_F(FusedUpdate, SgdHasTheBitsOfTheCpu) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (size_t k = 0; k < 3; ++k) {
      const Kind kind = kinds()[k];
      const Tensors there = make_parameters(gpu, dtype);
      const Tensors here = make_parameters(torch::kCPU, dtype);
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
    for (const Kind& kind : kinds()) {
      const Tensors low = make_parameters(gpu, dtype);
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

TEST_F(FusedUpdate, SevenHundredTensorsInFortyGroups) {
  for (const bool adamw : {false, true}) {
    Tensors results[2];
    for (const bool mine : {true, false}) {
      torch::manual_seed(3);
      Tensors& parameters = results[mine ? 0 : 1];
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (int i = 0; i < 700; ++i) {
        parameters.push_back(torch::randn({1 + i % 13}).to(gpu).requires_grad_(true));
        if (i % 18 == 0) {
          std::unique_ptr<torch::optim::OptimizerOptions> options;
          const double lr = 0.001 * (1 + i);
          if (adamw) {
            options = std::make_unique<torch::optim::AdamWOptions>(lr);
          } else {
            options = std::make_unique<torch::optim::SGDOptions>(
                torch::optim::SGDOptions(lr).momentum(i % 36 == 0 ? 0.9 : 0.0));
          }
          groups.emplace_back(Tensors{}, std::move(options));
        }
        groups.back().params().push_back(parameters.back());
      }
      std::unique_ptr<Optimizer> optimizer;
      if (mine && adamw) optimizer = std::make_unique<AdamW>(groups, AdamWOptions{});
      if (mine && !adamw) optimizer = std::make_unique<Sgd>(groups, SgdOptions{});
      if (!mine && adamw) {
        optimizer = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions());
      }
      if (!mine && !adamw) {
        optimizer = std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
      }
      for (int step = 0; step < 3; ++step) {
        set_gradients(parameters, step);
        if (mine) {
          fused(*optimizer).step_fused({}, {.max_norm = 3.0});
        } else {
          torch::nn::utils::clip_grad_norm_(parameters, 3.0);
          optimizer->step();
        }
      }
    }
    expect_near(results[0], results[1], 1e-5, adamw ? "adamw" : "sgd");
  }
}

TEST_F(FusedUpdate, ThousandsOfGradientsAreScannedTogether) {
  Tensors parameters;
  for (int i = 0; i < 2300; ++i) {
    parameters.push_back(torch::zeros({3}, gpu).requires_grad_(true));
    parameters.back().mutable_grad() = torch::ones({3}, gpu);
  }
  Sgd optimizer(parameters, {.lr = 1});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, gpu));
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
    const Tensors parameters = make_parameters(gpu, dtype);
    Tensors before;
    for (const auto& parameter : parameters) before.push_back(parameter.detach().clone());
    AdamW optimizer(parameters);
    GradScaler scaler;
    scaler.scale(torch::ones({}, gpu));
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
  const auto weight = torch::zeros({5}, torch::device(gpu).dtype(torch::kFloat64));
  const auto parameter = weight.requires_grad_(true);
  Sgd optimizer({parameter}, {.lr = 1e-200});
  GradScaler scaler({.init_scale = 1});
  scaler.scale(torch::ones({}, gpu));
  parameter.mutable_grad() = torch::full_like(parameter, 1e200);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(scaler.skipped_steps().empty());
  EXPECT_NEAR(parameter[3].item<double>(), -1, 1e-12);
}

TEST_F(FusedUpdate, TheSameNormEveryTime) {
  Tensors results;
  for (int run = 0; run < 3; ++run) {
    const Tensors parameters = {torch::zeros({3'000'017}, gpu).requires_grad_(true)};
    Sgd optimizer(parameters, {.lr = 1});
    set_gradients(parameters, 0);
    optimizer.step({.max_norm = 1.0});
    results.push_back(parameters[0].detach());
  }
  EXPECT_TRUE(torch::equal(results[0], results[1]));
  EXPECT_TRUE(torch::equal(results[0], results[2]));
  EXPECT_NEAR(results[0].norm().item<double>(), 1, 1e-5);
}

TEST_F(FusedUpdate, ADroppedStateCountsFromTheBeginning) {
  const Tensors actual = {torch::ones({5}, gpu).requires_grad_(true)};
  const Tensors expected = {torch::ones({5}, gpu).requires_grad_(true)};
  AdamW ours(actual);
  torch::optim::AdamW theirs(expected);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      ours.state().clear();
      theirs.state().clear();
    }
    set_gradients(actual, step);
    set_gradients(expected, step);
    ours.step();
    theirs.step();
  }
  expect_near(actual, expected, 1e-6, "adamw");
}

// A net's step with a scaler, as a user would write it.
struct Trained {
  explicit Trained(torch::Device gpu, bool adamw, torch::Tensor input) : x(std::move(input)) {
    torch::manual_seed(5);
    net = torch::nn::Sequential(torch::nn::Linear(13, 33), torch::nn::Tanh(),
                                torch::nn::Linear(33, 5));
    net->to(gpu);
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
    if (i == 5) trained.x.fill_(kInfinity);
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
    const auto x = torch::randn({8, 13}).to(gpu);
    Trained eager(gpu, adamw, x.clone());
    Trained captured(gpu, adamw, x.clone());
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
  Trained trained(gpu, /*adamw=*/false, torch::ones({8, 13}, gpu));
  trained.step();
  OneGraph graph(stream);
  graph.capture([&] { trained.step(); });
  auto& group = trained.optimizer->param_groups()[0];
  static_cast<torch::optim::SGDOptions&>(group.options()).momentum(0);
  expect_error(Code::kCapture, {"momentum of group 0", "anew"}, [&] { graph.replay(); });
}

TEST_F(FusedUpdate, AFirstStepInsideACaptureIsRefused) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const Tensors parameters = {torch::ones({5}, gpu).requires_grad_(true)};
  set_gradients(parameters, 0);
  OneGraph graph(stream);
  for (const Kind& kind : kinds()) {
    const auto optimizer = kind.ours(parameters);
    const Capture::Current current(graph);  // nothing is recorded: nothing may come so far
    expect_error(Code::kCapture, {"first step", "warmup"}, [&] { optimizer->step(); });
    GradScaler scaler;
    expect_error(Code::kCapture, {"first loss", "warmup"},
                 [&] { scaler.scale(torch::ones({}, gpu)); });
  }
}

}  // namespace
}  // namespace lockstep::test

#endif
