#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::test {

inline const torch::Device kGpu(torch::kCUDA, 0);

/// Skips, by name, where there is no GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }
};

}  // namespace lockstep::test
