#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/store.hpp"
#include "lockstep/lockstep.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {

using Weights = std::vector<std::pair<std::string, torch::Tensor>>;

/// Copies of all parameters and buffers.
inline Weights weights_of(const torch::nn::Module& module) {
  Weights weights;
  for (const auto& item : module.named_parameters()) {
    weights.emplace_back(item.key(), item.value().detach().clone());
  }
  for (const auto& item : module.named_buffers()) {
    weights.emplace_back(item.key(), item.value().detach().clone());
  }
  return weights;
}

inline void expect_same_bits(const Weights& actual, const Weights& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].first, expected[i].first);
    EXPECT_TRUE(torch::equal(actual[i].second, expected[i].second)) << actual[i].first;
  }
}

inline torch::nn::Sequential dropout_net() {
  return torch::nn::Sequential(torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 16),
                               torch::nn::ReLU(), torch::nn::Dropout(0.3),
                               torch::nn::Linear(16, 4));
}

/// The same rows in every run.
struct Rows {
  torch::Tensor x, y;
  explicit Rows(int64_t rows = 20) {
    const auto numbers = torch::arange(rows * 12, torch::kFloat32).reshape({rows, 12});
    x = torch::sin(numbers.narrow(1, 0, 8) * 0.37);
    y = torch::cos(numbers.narrow(1, 8, 4) * 0.11);
  }
  std::pair<torch::Tensor, torch::Tensor> at(const std::vector<int64_t>& indices) const {
    const auto chosen = torch::tensor(indices, torch::kInt64);
    return {x.index_select(0, chosen), y.index_select(0, chosen)};
  }
};

inline std::vector<int64_t> list_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& entry : list_checkpoints(folder)) steps.push_back(entry.step);
  return steps;
}

/// Trains in `folder` up to step `until`, from its latest checkpoint. `seed` is set at the start.
using Train = std::function<Weights(const std::string& folder, int64_t until, uint64_t seed)>;

/// A run that is interrupted twice, and goes on with other objects and another seed, must end with
/// the bits of one that was not.
inline void expect_exact_resume(const Train& train) {
  const ScratchFolder scratch;
  const auto whole = train(scratch.file("whole"), 9, 1);
  train(scratch.file("parts"), 3, 1);
  train(scratch.file("parts"), 4, 22);
  const auto parts = train(scratch.file("parts"), 9, 333);
  expect_same_bits(parts, whole);
  EXPECT_EQ(list_steps(scratch.file("parts")), list_steps(scratch.file("whole")));
}

}  // namespace lockstep::test
