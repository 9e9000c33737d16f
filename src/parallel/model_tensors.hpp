#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "parallel/gradient_buckets.hpp"
#include "parallel/model_sync.hpp"

namespace lockstep {

/// The parameters that are trained, each once: libtorch names a shared one at each owner.
std::vector<TrainedParameter> trained_in(const torch::nn::Module& module);

std::vector<NamedTensor> buffers_of(const torch::nn::Module& module);

/// Parameters, then buffers, in the order the module registered them.
std::vector<NamedTensor> model_tensors(const torch::nn::Module& module);

}  // namespace lockstep
