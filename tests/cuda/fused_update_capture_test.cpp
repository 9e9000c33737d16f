// Updates that are captured into a CUDA graph and replayed: the bits of eager steps.

#include <gtest/gtest.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <limits>

#include "device/capture.hpp"
#include "fused_update_support.hpp"
#include "lockstep/adam.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/sgd.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

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
  expect_error(Code::kCapture, {"momentum of group 0", "anew"}, [&] { graph.replay(); });
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
}  // namespace lockstep::test

#endif
