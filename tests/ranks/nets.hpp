#pragma once

// Modules that several tests of DataParallel train.

#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lockstep::test {

/// Two linear layers, 6 -> 10 -> 3.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 10));
    second = register_module("second", torch::nn::Linear(10, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

/// Takes and returns tensors in pairs, maps, tuples and vectors.
struct ManyImpl : torch::nn::Cloneable<ManyImpl> {
  ManyImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::full({1}, 2.0)); }
  std::tuple<torch::Tensor, std::map<std::string, torch::Tensor>, std::vector<torch::Tensor>>
  forward(const std::pair<torch::Tensor, torch::Tensor>& both,
          const std::map<std::string, torch::Tensor>& named, double factor) {
    return {both.first * scale * factor,
            {{"sum", both.second + named.at("z")},
             {"rows", torch::full({both.first.size(0)}, both.first.size(0))}},
            {named.at("z").sum()}};
  }
  torch::Tensor scale;
};
TORCH_MODULE(Many);

}  // namespace lockstep::test
