#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
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

/// An optimizer's state as bytes.
inline std::string saved(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  return stream.str();
}

inline void load(torch::optim::Optimizer& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

}  // namespace lockstep::test
