#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/fully_sharded_data_parallel.hpp"
#include "lockstep/optim.hpp"
#include "ranks/rank_threads.hpp"

namespace lockstep::test {

inline constexpr ShardStage kStages[] = {ShardStage::kOptimizer, ShardStage::kGradients,
                                         ShardStage::kParameters};

/// Weights that are the same in every process and thread.
inline void fill_weights(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  double phase = 0.1;
  for (auto& each : module.parameters()) {
    each.copy_(torch::arange(each.numel(), torch::kDouble)
                   .mul(0.37)
                   .add(phase)
                   .sin()
                   .mul(0.3)
                   .view(each.sizes()));
    phase += 0.7;
  }
}

inline torch::Tensor wave(std::vector<int64_t> sizes, double phase) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return torch::arange(count, torch::kDouble).mul(0.61).add(phase).cos().view(sizes);
}

/// Three linear layers in a Sequential, 6 -> 20 -> 20 -> 3, float64.
inline torch::nn::Sequential three_layers() {
  torch::nn::Sequential net(torch::nn::Linear(6, 20), torch::nn::Tanh(), torch::nn::Linear(20, 20),
                            torch::nn::Tanh(), torch::nn::Linear(20, 3));
  net->to(torch::kDouble);
  fill_weights(*net);
  return net;
}

/// The whole weights, in one row, on every rank.
template <class Module>
torch::Tensor whole_weights(FullyShardedDataParallel<Module>& fsdp) {
  const GatheredParameters gathered(fsdp);
  std::vector<torch::Tensor> flat;
  for (const auto& each : fsdp.module()->parameters())
    flat.push_back(each.detach().flatten().clone());
  return torch::cat(flat);
}

inline torch::Tensor weights_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> flat;
  for (const auto& each : module.parameters()) flat.push_back(each.detach().flatten().clone());
  return torch::cat(flat);
}

/// This rank's rows of a batch of `rows` times the number of ranks.
inline torch::Tensor own_rows(const torch::Tensor& batch, const Communicator& comm) {
  return batch.chunk(comm.size(), 0)[static_cast<size_t>(comm.rank())];
}

inline void expect_near_all(const torch::Tensor& value, const torch::Tensor& wanted,
                            const std::string& what, double tolerance = 1e-11) {
  EXPECT_EQ(value.numel(), wanted.numel()) << what;
  EXPECT_TRUE(torch::allclose(value, wanted, tolerance, tolerance))
      << what << " is off by " << (value - wanted).abs().max().item<double>();
}

}  // namespace lockstep::test
