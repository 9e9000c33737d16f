#include "precision/exact_squares.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "tensor_support.hpp"

namespace lockstep::test::exact_squares_test {
namespace {

double squares(const std::vector<torch::Tensor>& gradients) {
  return value_of_squares(exact_squares(gradients, torch::kCPU)).item<double>();
}

// Of many magnitudes, so that the order of additions matters.
torch::Tensor wild_numbers(int64_t count) {
  const auto at = torch::arange(count, torch::kDouble);
  return (at.mul(0.7).sin() * at.mul(1.3).cos().mul(20).exp()).to(torch::kFloat);
}

TEST(ExactSquares, AnyCutAndOrderGivesTheSameBits) {
  const auto numbers = wild_numbers(200'003);
  const double whole = squares({numbers});
  EXPECT_NE(numbers.to(torch::kDouble).square().flip(0).cumsum(0)[-1].item<double>(),
            numbers.to(torch::kDouble).square().cumsum(0)[-1].item<double>())
      << "plain sums depend on the order";
  EXPECT_EQ(squares({numbers.flip(0)}), whole);
  EXPECT_EQ(squares({numbers.narrow(0, 100, 200'003 - 100), numbers.narrow(0, 0, 100)}), whole);
  EXPECT_EQ(squares({numbers.to(torch::kDouble)}), whole);
  for (const int ranks : {2, 3, 5}) {
    auto words = torch::zeros_like(exact_squares({}, torch::kCPU));
    for (const auto& part : numbers.chunk(ranks)) {
      words += exact_squares(std::span(&part, 1), torch::kCPU);
    }
    EXPECT_EQ(value_of_squares(words).item<double>(), whole) << ranks;
  }
  EXPECT_NEAR(whole / numbers.to(torch::kDouble).square().sum().item<double>(), 1, 1e-14);
}

TEST(ExactSquares, ThreadsMakeNoDifference) {
  const auto numbers = wild_numbers(400'000);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double alone = squares({numbers});
  at::set_num_threads(2);
  EXPECT_EQ(squares({numbers}), alone);
  at::set_num_threads(before);
}

TEST(ExactSquares, EveryKindOfNumber) {
  const auto of = [](double number, torch::ScalarType dtype = torch::kDouble) {
    return squares({torch::full({1}, number, dtype)});
  };
  EXPECT_EQ(of(0), 0);
  EXPECT_EQ(of(-3), 9);
  EXPECT_EQ(of(1.5, torch::kBFloat16), 2.25);
  EXPECT_EQ(of(1.5, torch::kHalf), 2.25);
  EXPECT_EQ(of(std::ldexp(1, -149), torch::kFloat), std::ldexp(1, -298)) << "the smallest float";
  EXPECT_EQ(of(std::ldexp(1, -537)), std::ldexp(1, -1074)) << "the smallest square";
  EXPECT_EQ(of(std::ldexp(1.75, 511)), std::ldexp(3.0625, 1022)) << "one of the largest";
  EXPECT_EQ(of(1e200), INFINITY) << "as the square of a double is";
  EXPECT_EQ(of(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(of(NAN)));
  EXPECT_TRUE(std::isnan(squares({torch::tensor({INFINITY, NAN})})));
  EXPECT_EQ(squares({}), 0);
  EXPECT_EQ(squares({torch::Tensor(), torch::ones({0}), torch::ones({2, 3}).t()}), 6);
  // A small square counts beside a large one: 2^60 + 2^-60 cannot be a double, but the sum of the
  // parts and what is left of it can.
  const auto large = torch::full({1}, std::ldexp(1, 30), torch::kDouble);
  const auto small = torch::full({1}, std::ldexp(1, -30), torch::kDouble);
  const auto both = exact_squares(std::vector{large, small}, torch::kCPU);
  const auto rest = both - exact_squares(std::span(&large, 1), torch::kCPU);
  EXPECT_EQ(value_of_squares(rest).item<double>(), std::ldexp(1, -60));
}

}  // namespace
}  // namespace lockstep::test::exact_squares_test
