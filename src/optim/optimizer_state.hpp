#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "optim/step_items.hpp"
#include "torch_compat.hpp"

// What Sgd, Adam and AdamW share apart from the update: their parameters, gradients and states.
namespace lockstep {

/// Each parameter once: libtorch's parameters() lists a shared one at each of its owners.
std::vector<torch::Tensor> without_repeats(const std::vector<torch::Tensor>& parameters);

/// The same within each group.
ParamGroups without_repeats(ParamGroups groups);

/// Runs a closure as torch::optim does; undefined without one.
torch::Tensor run_closure(const torch::optim::Optimizer::LossClosure& closure);

/// Drops the gradients of all parameters, or fills them with zeros.
void zero_gradients(const ParamGroups& groups, bool set_to_none);

/// Writes the masters of an optimizer's parameters, in the order of the parameters.
void save_masters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                  torch::serialize::OutputArchive& archive);

/// Reads what save_masters() wrote and changes nothing. Refuses an archive without masters.
std::vector<torch::Tensor> read_masters(const ParamGroups& groups,
                                        const std::optional<MasterWeights>& masters,
                                        torch::serialize::InputArchive& archive);

/// Takes over what read_masters() returned and rounds the parameters again.
void put_masters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                 const std::vector<torch::Tensor>& saved);

/// Returns a parameter's state in `optimizer`, of libtorch's own type; makes it if it is missing.
template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  auto& state = optimizer.state()[compat::optimizer_state_key(parameter.unsafeGetTensorImpl())];
  if (state == nullptr) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

/// Returns zeroed tensors like these, with the same strides, from one allocation for each dtype and
/// device. Each has a storage of its own, so that saving one does not write them all.
std::vector<torch::Tensor> zeros_like_all(std::span<const torch::Tensor> models);

/// Returns a state tensor in the dtype, device and memory order of its weight. That is the tensor
/// itself, unless it was loaded or the weight has moved. `what` names it in errors.
torch::Tensor fit_state(const torch::Tensor& state, const torch::Tensor& weight,
                        std::string_view what);

}  // namespace lockstep
