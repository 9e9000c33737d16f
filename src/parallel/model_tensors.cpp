#include "parallel/model_tensors.hpp"

#include <fmt/format.h>

#include <unordered_set>
#include <utility>

#include "lockstep/master_weights.hpp"

#include "lockstep/tensor_text.hpp"

namespace lockstep {

std::vector<TrainedParameter> trained_in(const torch::nn::Module& module) {
  std::vector<TrainedParameter> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    parameters.push_back({item.key(), tensor});
  }
  return parameters;
}

std::vector<ParameterForm> forms_of(std::span<const TrainedParameter> parameters) {
  std::vector<ParameterForm> forms;
  for (const auto& [name, tensor] : parameters) {
    forms.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.device()});
  }
  return forms;
}

std::optional<ParameterChange> find_change(std::span<const TrainedParameter> known,
                                           std::span<const ParameterForm> forms,
                                           const std::vector<TrainedParameter>& trained) {
  size_t next = 0;
  for (const auto& [name, tensor] : trained) {
    while (next < known.size() && !known[next].tensor.is_same(tensor)) ++next;
    if (next == known.size()) return ParameterChange{name, "was added or made trainable"};
    const auto& [sizes, dtype, device] = forms[next];
    const bool moved = tensor.is_cpu() ? !device.is_cpu() : tensor.device() != device;
    if (moved || tensor.scalar_type() != dtype) {
      return ParameterChange{name, "was moved or converted"};
    }
    if (tensor.sizes() != torch::IntArrayRef(sizes)) {
      return ParameterChange{name, fmt::format("was resized from {} to {}", shape_text(sizes),
                                               shape_text(tensor.sizes()))};
    }
    ++next;
  }
  return std::nullopt;
}

std::vector<NamedTensor> buffers_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) buffers.push_back({item.key(), item.value(), false});
  }
  return buffers;
}

std::vector<NamedTensor> model_tensors(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) {
      tensors.push_back({item.key(), item.value(), item.value().requires_grad()});
    }
  }
  for (auto& buffer : buffers_of(module)) tensors.push_back(std::move(buffer));
  return tensors;
}

std::vector<NamedTensor> trained_in_full_precision(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (auto& [name, parameter] : trained_in(module)) {
    const auto masters = MasterWeights::holding(parameter);
    tensors.push_back({name, masters ? masters->of(parameter) : parameter, true});
  }
  return tensors;
}

void broadcast_model(const Communicator& comm, const torch::nn::Module& module, int root,
                     const char* label) {
  auto tensors = model_tensors(module);
  std::vector<std::pair<MasterWeights, torch::Tensor>> held;
  for (auto& each : tensors) {
    const auto masters = MasterWeights::holding(each.tensor);
    if (!masters) continue;
    held.emplace_back(*masters, each.tensor);
    each.tensor = masters->of(each.tensor);
  }
  broadcast_tensors(comm, tensors, root, label);
  for (const auto& [masters, parameter] : held) masters.round(parameter);
}

}  // namespace lockstep
