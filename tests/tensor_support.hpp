#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "support.hpp"

namespace lockstep::test {

/// Equal within the rounding of the dtype.
inline void expect_close(const torch::Tensor& actual, const torch::Tensor& expected,
                         const std::string& what) {
  ASSERT_TRUE(actual.defined() && expected.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double tolerance = actual.scalar_type() == torch::kFloat64 ? 1e-12 : 1e-5;
  EXPECT_TRUE(torch::allclose(actual, expected.to(actual.dtype()), tolerance, tolerance))
      << what << ": largest difference " << (actual - expected).abs().max().item<double>();
}

}  // namespace lockstep::test
