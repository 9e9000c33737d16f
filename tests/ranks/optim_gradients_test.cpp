// What lockstep's optimizers do to gradients on the way: clipped, unscaled and cleared as by
// torch's own functions.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "optim_cases.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {
namespace {

TEST(Optim, ClippingIsClipGradNorm) {
  for (const double max_norm : {0.5, 1e6, 0.0}) {
    for (const auto& pair : pairs_named({"dampening", "adamw", "adam, other numbers"})) {
      const auto both = side_by_side(pair);
      for (int step = 0; step < 10; ++step) {
        both.set_gradients(step);
        const auto norm = fused(*both.ours).step_fused({}, {.max_norm = max_norm});
        const auto expected = torch::nn::utils::clip_grad_norm_(both.expected, max_norm);
        EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected) << pair.name;
        both.theirs->step();
      }
      both.expect_equal(1e-5);
      for (size_t i = 0; i < both.actual.size(); ++i) {
        expect_close(both.actual[i].grad(), both.expected[i].grad(), pair.name + ": gradient left");
      }
    }
  }
}

TEST(Optim, ClippingAnInfiniteNormDoesAsTorchDoes) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const auto both = side_by_side(sgd_pair("sgd", {.lr = 0.1}));
    both.set_gradients(0);
    for (const auto& parameters : {both.actual, both.expected}) parameters[1].grad()[1] = bad;
    dynamic_cast<Sgd&>(*both.ours).step({.max_norm = 1.0});
    torch::nn::utils::clip_grad_norm_(both.expected, 1.0);
    both.theirs->step();
    for (size_t i = 0; i < both.actual.size(); ++i) {
      EXPECT_TRUE(torch::allclose(both.actual[i], both.expected[i], 1e-6, 0, /*equal_nan=*/true))
          << i;
    }
  }
}

TEST(Optim, ScaledGradientsAreUnscaledOnTheWay) {
  constexpr double kScale = 1024;
  for (const auto& pair : pairs_named({"plain", "nesterov", "adamw"})) {
    for (const bool give_squares : {false, true}) {
      const auto both = side_by_side(pair);
      for (int step = 0; step < 10; ++step) {
        set_gradients(both.actual, step, kScale);
        set_gradients(both.expected, step);
        ScaledGradients scaled;
        scaled.inverse_scale = 1 / kScale;
        if (give_squares) {
          double squares = 0;
          for (const auto& parameter : both.actual) {
            squares += parameter.grad().to(torch::kFloat64).square().sum().item<double>();
          }
          scaled.sum_of_squares = torch::tensor(squares, torch::kFloat64);
        }
        fused(*both.ours).step_fused(scaled, {.max_norm = 2.0});
        torch::nn::utils::clip_grad_norm_(both.expected, 2.0);
        both.theirs->step();
      }
      both.expect_equal(1e-5);
      expect_close(both.actual[4].grad(), both.expected[4].grad(), "unscaled and clipped");
    }
  }
}

TEST(Optim, AnOverflowThatTheScalerFoundChangesNothing) {
  const Tensors parameters = odd_parameters();
  AdamW optimizer(parameters);
  set_gradients(parameters, 0);
  ScaledGradients scaled;
  scaled.found_inf = torch::ones({});
  optimizer.step_fused(scaled, {.zero_grad = true});
  const Tensors untouched = odd_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(torch::equal(parameters[i], untouched[i]));
    EXPECT_FALSE(parameters[i].grad().defined());
  }
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(Optim, ZeroGradRidesAlong) {
  for (const auto& pair : pairs_named({"plain", "adamw"})) {
    const auto both = side_by_side(pair);
    both.set_gradients(0);
    fused(*both.ours).step_fused({}, {.max_norm = 0.1, .zero_grad = true});
    torch::nn::utils::clip_grad_norm_(both.expected, 0.1);
    both.theirs->step();
    both.expect_equal(1e-6);
    for (const auto& parameter : both.actual) EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(Optim, ZeroGradByItself) {
  const Tensors parameters = odd_parameters();
  Sgd sgd(parameters);
  set_gradients(parameters, 0);
  sgd.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(parameters[4].grad().abs().sum().item<float>(), 0);
  AdamW adamw(parameters);
  adamw.zero_grad();
  EXPECT_FALSE(parameters[4].grad().defined());
}

TEST(Optim, GradientsInAnotherMemoryOrder) {
  const auto both = side_by_side(adamw_pair("weights", {}));
  for (int step = 0; step < 5; ++step) {
    both.set_gradients(step);
    for (const auto& parameters : {both.actual, both.expected}) {
      for (const size_t i : {6U, 7U}) {
        parameters[i].mutable_grad() = parameters[i].grad().contiguous();
      }
    }
    ASSERT_NE(both.actual[7].strides(), both.actual[7].grad().strides());
    dynamic_cast<AdamW&>(*both.ours).step({.max_norm = 0.5});
    torch::nn::utils::clip_grad_norm_(both.expected, 0.5);
    both.theirs->step();
  }
  both.expect_equal(1e-5);
  expect_close(both.actual[7].grad(), both.expected[7].grad(), "a clipped gradient, written back");
}

TEST(Optim, AGradientThatIsOneNumberRepeatedIsClippedToo) {
  const auto weight = torch::zeros({4}, torch::requires_grad());
  weight.mutable_grad() = torch::ones({}).expand({4});
  Sgd optimizer({weight}, {.lr = 1});
  optimizer.step({.max_norm = 1.0});
  expect_close(weight.detach(), torch::full({4}, -0.5F), "weight");
  expect_close(weight.grad(), torch::full({4}, 0.5F), "gradient");
}

}  // namespace
}  // namespace lockstep::test
