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

/// The parameters that are trained, as they are kept in full precision: a parameter that
/// MasterWeights hold is represented by its float32 weight.
std::vector<NamedTensor> trained_in_full_precision(const torch::nn::Module& module);

/// The root's parameters and buffers go to all ranks. Where MasterWeights hold a parameter, its
/// float32 weight travels and the parameter is rounded from it: otherwise the ranks would agree on
/// the rounded weights only and drift apart at the first update. Collective.
void broadcast_model(const Communicator& comm, const torch::nn::Module& module, int root,
                     const char* label);

}  // namespace lockstep
