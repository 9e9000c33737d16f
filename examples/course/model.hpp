#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>

#include "course/options.hpp"

namespace course {

/// The net that --model names, whichever that is. It has the parts of that net as its own, so that
/// parameters keep their names.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Options& options);
  torch::Tensor forward(const torch::Tensor& x) { return forward_(x); }

 private:
  // A base class with a virtual forward would be simpler, but torch::nn::Cloneable derives from
  // Module virtually in libtorch 1.13 and plainly in 2.x, so that no class can stand beside it.
  template <class Net>
  void adopt(const std::shared_ptr<Net>& net);

  std::function<torch::Tensor(const torch::Tensor&)> forward_;
};
TORCH_MODULE(Model);

}  // namespace course
