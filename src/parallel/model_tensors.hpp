#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/gradient_buckets.hpp"
#include "parallel/model_sync.hpp"

namespace lockstep {

/// The parameters that are trained, each once: libtorch names a shared one at each owner.
std::vector<TrainedParameter> trained_in(const torch::nn::Module& module);

/// What a parameter was when somebody began to average its gradients.
struct ParameterForm {
  std::vector<int64_t> sizes;
  torch::ScalarType dtype = torch::kFloat;
  torch::Device device = torch::kCPU;
};

std::vector<ParameterForm> forms_of(std::span<const TrainedParameter> parameters);

/// A parameter whose gradients would not be averaged, and what happened to it: "was resized …".
struct ParameterChange {
  std::string name;
  std::string what;
};

/// The first of `trained`, those of the module now, that is not one of `known` any more, or has
/// another form than it had.
std::optional<ParameterChange> find_change(std::span<const TrainedParameter> known,
                                           std::span<const ParameterForm> forms,
                                           const std::vector<TrainedParameter>& trained);

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
