#pragma once

#include <torch/nn/module.h>
#include <torch/utils.h>

#include <vector>

namespace lockstep {

/// Guard: forwards inside it leave no mark on buffers such as running means.
class KeepBuffers {
 public:
  explicit KeepBuffers(const torch::nn::Module& module) : buffers_(module.buffers()) {
    const torch::NoGradGuard no_grad;
    for (const auto& buffer : buffers_) values_.push_back(buffer.detach().clone());
  }
  ~KeepBuffers() {
    const torch::NoGradGuard no_grad;
    // Through an alias with a version of its own: a graph may have saved the buffer, but a training
    // backward does not read it.
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].variable_data().copy_(values_[i]);
  }
  KeepBuffers(const KeepBuffers&) = delete;
  KeepBuffers& operator=(const KeepBuffers&) = delete;

 private:
  std::vector<torch::Tensor> buffers_;
  std::vector<torch::Tensor> values_;  // [buffer]
};

}  // namespace lockstep
