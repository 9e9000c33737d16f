#pragma once

// The models that the tests of Pipeline train, and the single device they compare with.

#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/pipeline.hpp"
#include "lockstep/schedule.hpp"
#include "tensor_support.hpp"

namespace lockstep::test {

inline constexpr int64_t kWidth = 12;

/// Nets are made one after the other: ranks that are threads share libtorch's generator.
inline std::mutex& seeding() {
  static std::mutex mutex;
  return mutex;
}

/// `layers` times Linear and Tanh.
inline torch::nn::Sequential deep_mlp(int64_t layers, uint64_t seed = 7) {
  torch::manual_seed(seed);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

/// Norm, attention and residual sum: a block with forks inside.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        query(register_module("query", torch::nn::Linear(width, width))),
        key(register_module("key", torch::nn::Linear(width, width))),
        value(register_module("value", torch::nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = norm(x);
    const auto weights = torch::softmax(query(y).matmul(key(y).transpose(1, 2)), -1);
    return x + weights.matmul(value(y));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear query, key, value;
};
TORCH_MODULE(Block);

/// Turns rows of kWidth into sequences of 3 positions, and back into rows.
inline torch::nn::Sequential small_transformer(int64_t blocks, uint64_t seed = 8) {
  torch::manual_seed(seed);
  torch::nn::Sequential net;
  net->push_back(torch::nn::Functional([](const torch::Tensor& x) {
    return x.reshape({x.size(0), 3, -1});
  }));
  for (int64_t i = 0; i < blocks; ++i) net->push_back(Block(kWidth / 3));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(kWidth, kWidth));
  return net;
}

/// Cuts into stages with the same number of layers.
inline std::vector<torch::nn::Sequential> cut(const torch::nn::Sequential& net, int stages) {
  return split_stages(net, cut_by_count(static_cast<int64_t>(net->size()), stages));
}

struct Rows {
  torch::Tensor x;
  torch::Tensor y;
};

inline Rows draw_rows(int64_t count, uint64_t seed) {
  torch::manual_seed(seed);
  const auto x = torch::randn({count, kWidth});
  return {x, torch::sin(x.roll(1, 1))};
}

inline torch::Tensor mse(const torch::Tensor& out, const torch::Tensor& y) {
  return torch::mse_loss(out, y);
}

/// The results of a training.
struct Trained {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
};

inline std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

/// `accumulate` batches in every step.
inline Trained train_alone(torch::nn::Sequential net, int steps, int64_t rows, int accumulate = 1) {
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trained trained;
  for (int step = 0; step < steps; ++step) {
    double sum = 0;
    for (int micro = 0; micro < accumulate; ++micro) {
      const auto batch = draw_rows(rows, static_cast<uint64_t>(100 + step * accumulate + micro));
      const auto loss = mse(net->forward(batch.x), batch.y);
      (loss / accumulate).backward();
      sum += loss.item<double>() / accumulate;
    }
    trained.losses.push_back(sum);
    optimizer.step();
    optimizer.zero_grad();
  }
  trained.weights = copies(net->parameters());
  return trained;
}

inline void expect_same(const Trained& actual, const Trained& expected, const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size()) << what;
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5) << what << ", loss " << i;
  }
  ASSERT_EQ(actual.weights.size(), expected.weights.size()) << what;
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    expect_close(actual.weights[i], expected.weights[i], what + ", weight " + std::to_string(i));
  }
}

/// Compares every local weight with that of a training on one device.
inline void expect_stage_weights(const Pipeline& pipeline, const torch::nn::Sequential& whole,
                                 const Trained& alone) {
  std::map<std::string, size_t> index;  // among the whole model's parameters
  for (const auto& item : whole->named_parameters()) index.emplace(item.key(), index.size());
  for (const int stage : pipeline.local_stages()) {
    for (const auto& item : pipeline.stage(stage)->named_parameters()) {
      expect_close(item.value().detach(), alone.weights.at(index.at(item.key())), item.key());
    }
  }
}

}  // namespace lockstep::test
