// Captured steps and checkpoints: a run that is interrupted and captures anew ends with the bits of
// one that was not.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "captured_step_support.hpp"
#include "lockstep/autocast.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/grad_scaler.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/optim.hpp"
#include "support.hpp"

namespace lockstep::test::captured_step_resume_test {
namespace {

constexpr int kOverflow = 9;  // this step's loss is infinite, so a GradScaler skips it

struct Recipe {
  bool captured = true;
  bool masters = false;
  bool scaled = false;  // fp16
  int micro_steps = 1;
};

// Trains up to step `until` from the folder's latest checkpoint; saves after every step.
Result train(const Recipe& recipe, const std::string& folder, int until, uint64_t seed) {
  auto net = make_net(/*dropout=*/0.3);
  torch::manual_seed(seed);
  std::optional<MasterWeights> masters;
  if (recipe.masters) masters.emplace(*net, MasterWeightsOptions{.dtype = torch::kHalf});
  AdamW optimizer(net->parameters(), {.lr = 1e-2, .masters = masters});
  GradScaler scaler({.init_scale = 1024, .growth_interval = 4, .enabled = recipe.scaled});
  Checkpoint checkpoint(folder, {.every = 1, .keep = 2});
  checkpoint.add("model", *net).add("optimizer", optimizer, *net).add("scaler", scaler);
  if (masters) checkpoint.add("masters", *masters, *net);
  CapturedStep step(
      [&](const std::vector<torch::Tensor>& all) {
        torch::Tensor sum;
        for (size_t i = 0; i < all.size(); i += 2) {
          torch::Tensor loss;
          {
            const Autocast amp(kGpu, torch::kHalf, recipe.scaled || recipe.masters);
            loss = torch::mse_loss(net->forward(all[i]).to(torch::kFloat32), all[i + 1]);
          }
          scaler.scale(loss / recipe.micro_steps).backward();
          sum = sum.defined() ? sum + loss.detach() : loss.detach();
        }
        scaler.step(optimizer);
        scaler.update();
        net->zero_grad(/*set_to_none=*/true);
        return sum;
      },
      {.enabled = recipe.captured});

  std::vector<float> losses;
  const auto resumed = static_cast<int>(checkpoint.resume());
  for (int number = resumed + 1; number <= until; ++number) {
    std::vector<torch::Tensor> all;
    for (int micro = 0; micro < recipe.micro_steps; ++micro) {
      const Rows rows = rows_of_step(number * recipe.micro_steps + micro);
      if (recipe.scaled && number == kOverflow) rows.y.fill_(1e30F);
      all.insert(all.end(), {rows.x, rows.y});
    }
    losses.push_back(step(all).item<float>());
    EXPECT_TRUE(checkpoint.step(number));
  }
  checkpoint.finish();
  if (until - resumed > 3) {
    EXPECT_EQ(step.replayed(), recipe.captured) << step.why_not();
  }
  losses.push_back(static_cast<float>(scaler.get_scale()));
  return result_of(std::move(losses), *net);
}

// Interrupted among replays and again in the warm-up of the next run, and eager at last.
void expect_exact_resume(Recipe recipe) {
  const ScratchFolder scratch;
  const Result whole = train(recipe, scratch.file("whole"), kSteps, 1);
  train(recipe, scratch.file("parts"), 6, 1);
  train(recipe, scratch.file("parts"), 8, 22);
  Result parts = train(recipe, scratch.file("parts"), 14, 333);
  EXPECT_EQ(parts.losses.size(), 7U) << "six steps, and the scale";
  recipe.captured = false;
  parts = train(recipe, scratch.file("parts"), kSteps, 4444);
  const std::vector<float> last(whole.losses.end() - static_cast<long>(parts.losses.size()),
                                whole.losses.end());
  expect_same_bits(parts, {last, whole.weights});
}

TEST_F(CudaCapture, AResumedRunHasTheSameBits) {
  expect_exact_resume({});
}

TEST_F(CudaCapture, SoItHasWithAScalerThatSkipsAStep) {
  expect_exact_resume({.scaled = true});
}

TEST_F(CudaCapture, SoItHasWithMasterWeightsAndAccumulation) {
  expect_exact_resume({.masters = true, .scaled = true, .micro_steps = 2});
}

// Graphs refer to the state that the optimizer had when they were captured.
TEST_F(CudaCapture, ResumingAfterTheCaptureIsRefused) {
  const ScratchFolder scratch;
  SgdNet trained({.lr = 0.1, .momentum = 0.9});
  CapturedStep step = trained.captured({});
  Checkpoint checkpoint(scratch.file("run"), {.every = 1});
  checkpoint.add("model", *trained.net).add("optimizer", trained.optimizer, *trained.net);
  losses_of(step, 5);
  ASSERT_TRUE(step.replayed()) << step.why_not();
  checkpoint.save(5);
  expect_error(Code::kCapture, {"captured"}, [&] {
    checkpoint.resume();
    losses_of(step, 1);
  });
}

}  // namespace
}  // namespace lockstep::test::captured_step_resume_test
