// The scan of gradients that a step needs: their norm, and the first that is not finite.

#include "precision/gradient_scan.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace lockstep::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(GradientScan, TheSameBitsForAnyNumberOfThreads) {
  torch::manual_seed(4);
  const std::vector<torch::Tensor> gradients = {torch::randn({301, 1003}), torch::Tensor(),
                                                torch::randn({5}), torch::randn({200'003})};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto alone = scan_gradients(gradients);
  at::set_num_threads(3);
  const auto together = scan_gradients(gradients);
  at::set_num_threads(threads);
  EXPECT_EQ(alone.sum_of_squares, together.sum_of_squares);
  double expected = 0;
  for (const auto& gradient : gradients) {
    if (gradient.defined()) expected += gradient.to(torch::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(alone.sum_of_squares / expected, 1, 1e-12);
  EXPECT_EQ(alone.first_nonfinite, -1);
}

TEST(GradientScan, NamesTheFirstGradientThatIsNotFinite) {
  std::vector<torch::Tensor> gradients = {torch::ones({9}), torch::Tensor(), torch::ones({9000}),
                                          torch::ones({3}, torch::kHalf)};
  gradients[3][1] = kInfinity;
  EXPECT_EQ(scan_gradients(gradients).first_nonfinite, 3);
  gradients[2][8999] = kNan;
  EXPECT_EQ(scan_gradients(gradients).first_nonfinite, 2);
}

}  // namespace
}  // namespace lockstep::test
