#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "kernels/update_kernels.hpp"
#include "lockstep/fused_step.hpp"
#include "optim/step_items.hpp"

namespace lockstep {

/// Each parameter once: libtorch's parameters() lists a shared one at each of its owners.
std::vector<torch::Tensor> without_repeats(const std::vector<torch::Tensor>& parameters);

/// The same within each group.
std::vector<torch::optim::OptimizerParamGroup> without_repeats(
    std::vector<torch::optim::OptimizerParamGroup> groups);

/// Runs a closure as torch::optim does; undefined without one.
torch::Tensor run_closure(const torch::optim::Optimizer::LossClosure& closure);

/// Drops the gradients of all parameters, or fills them with zeros.
void zero_gradients(const std::vector<torch::optim::OptimizerParamGroup>& groups, bool set_to_none);

/// Writes the masters of an optimizer's parameters, in their order.
void save_masters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const std::optional<MasterWeights>& masters,
                  torch::serialize::OutputArchive& archive);

/// Reads them, in their order, and changes nothing. Refuses an archive without them.
std::vector<torch::Tensor> read_masters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::optional<MasterWeights>& masters, torch::serialize::InputArchive& archive);

/// Takes over what read_masters() gave, and rounds the parameters anew.
void put_masters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 const std::optional<MasterWeights>& masters,
                 const std::vector<torch::Tensor>& saved);

/// Whether a scaler on the CPU found an overflow: then nothing changes.
bool skips_on_cpu(const StepItems& items, const ScaledGradients& gradients);

/// Where the elements of an item and of its state lie.
UpdatePiece piece_of(const StepItem& item, const torch::Tensor& momentum,
                     const torch::Tensor& variance);
Dtype dtype_of(const StepItem& item);

/// A parameter's state in `optimizer`, of libtorch's own kind; made where it is missing.
template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  auto& state = optimizer.state()[compat::optimizer_state_key(parameter.unsafeGetTensorImpl())];
  if (state == nullptr) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

}  // namespace lockstep
