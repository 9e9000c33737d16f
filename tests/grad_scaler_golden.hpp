#pragma once

// What PyTorch's GradScaler did on planted gradients (tests/parity/grad_scaler_peer.py), and the
// same played by lockstep's.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/grad_scaler.hpp"

namespace lockstep::test {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::Tensor> parameters, double lr)>;

inline nlohmann::json golden_scaler() {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/parity/grad_scaler.json");
  return nlohmann::json::parse(file);
}

inline GradScalerOptions golden_options(const nlohmann::json& given) {
  GradScalerOptions options;
  options.init_scale = given.value("init_scale", options.init_scale);
  options.growth_factor = given.value("growth_factor", options.growth_factor);
  options.backoff_factor = given.value("backoff_factor", options.backoff_factor);
  options.growth_interval = given.value("growth_interval", options.growth_interval);
  return options;
}

inline torch::Tensor golden_slopes(const nlohmann::json& pair, torch::Device device) {
  std::vector<double> slopes;
  for (const auto& slope : pair) {
    if (slope.is_number()) {
      slopes.push_back(slope.get<double>());
    } else {
      slopes.push_back(slope == "nan"    ? std::numeric_limits<double>::quiet_NaN()
                       : slope == "-inf" ? -std::numeric_limits<double>::infinity()
                                         : std::numeric_limits<double>::infinity());
    }
  }
  return torch::tensor(slopes).to(device, torch::kFloat);
}

/// Plays one case and compares after each step: scale, tracker and weights to the bit, who stepped,
/// and at the end which steps were reported as skipped.
inline void play_golden_case(const nlohmann::json& golden, double lr, torch::Device device,
                             const MakeOptimizer& make_optimizer) {
  std::vector<SkippedStep> skipped;
  std::vector<SkippedStep> expected_skipped;
  auto options = golden_options(golden.at("options"));
  double scale_before = options.init_scale;
  options.on_skip = [&](const SkippedStep& each) { skipped.push_back(each); };
  auto scaler = std::make_unique<GradScaler>(options);
  std::vector<torch::Tensor> weights;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  for (size_t i = 0; i < golden.at("steps")[0].at("slopes").size(); ++i) {
    weights.push_back(torch::ones({2}, torch::TensorOptions(device)).requires_grad_());
    optimizers.push_back(make_optimizer({weights.back()}, lr));
  }
  int64_t updates = 0;
  int index = 0;
  for (const auto& step : golden.at("steps")) {
    SCOPED_TRACE(golden.at("name").get<std::string>() + ", step " + std::to_string(index++));
    if (step.at("resume").get<bool>()) {
      const auto saved = scaler->state_dict();
      (void)scaler->skipped_steps();  // all that are still on their way
      scaler = std::make_unique<GradScaler>(GradScalerOptions{.on_skip = options.on_skip});
      scaler->load_state_dict(*saved);
      updates = 0;
    }
    auto loss = torch::zeros({}, torch::TensorOptions(device));
    std::vector<torch::Tensor> before;
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].mutable_grad().reset();
      before.push_back(weights[i].detach().clone());
      loss = loss + (weights[i] * golden_slopes(step.at("slopes")[i], device)).sum();
    }
    scaler->scale(loss).backward();
    for (const auto& optimizer : optimizers) {
      if (step.at("unscale").get<bool>()) scaler->unscale_(*optimizer);
      scaler->step(*optimizer);
    }
    const auto& new_scale = step.at("new_scale");
    scaler->update(new_scale.is_null() ? std::nullopt : std::optional(new_scale.get<double>()));
    ++updates;

    const auto& after = step.at("after");
    EXPECT_EQ(scaler->get_scale(), after.at("scale").get<double>());
    EXPECT_EQ(scaler->state_dict()->growth_tracker, after.at("tracker").get<int64_t>());
    int64_t overflowed = -1;
    for (size_t i = 0; i < weights.size(); ++i) {
      const bool stepped = after.at("stepped")[i].get<bool>();
      EXPECT_EQ(!torch::equal(weights[i], before[i]), stepped) << "optimizer " << i;
      EXPECT_TRUE(torch::equal(weights[i], golden_slopes(after.at("weights")[i], device)))
          << "optimizer " << i << ": " << weights[i] << " and not " << after.at("weights")[i];
      if (!stepped && overflowed < 0) overflowed = static_cast<int64_t>(i);
    }
    if (overflowed >= 0) {
      expected_skipped.push_back(
          {updates, "parameter 0 of group 0", scale_before, scaler->get_scale()});
    }
    scale_before = scaler->get_scale();
  }
  (void)scaler->skipped_steps();
  ASSERT_EQ(skipped.size(), expected_skipped.size());
  for (size_t i = 0; i < skipped.size(); ++i) {
    EXPECT_EQ(skipped[i].step, expected_skipped[i].step) << i;
    EXPECT_EQ(skipped[i].parameter, expected_skipped[i].parameter) << i;
    EXPECT_EQ(skipped[i].scale_before, expected_skipped[i].scale_before) << i;
    EXPECT_EQ(skipped[i].scale_after, expected_skipped[i].scale_after) << i;
  }
}

}  // namespace lockstep::test
