// The update kernels: every dtype, size and alignment against torch::optim or the CPU's loops.

#include <gtest/gtest.h>
#include <torch/torch.h>

#if LOCKSTEP_CUDA

#include <type_traits>

#include "fused_update_support.hpp"
#include "lockstep/adam.hpp"
#include "lockstep/sgd.hpp"

namespace lockstep::test {
namespace {

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

}  // namespace
}  // namespace lockstep::test

#endif
