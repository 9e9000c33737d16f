#include "parallel/model_tensors.hpp"

#include <unordered_set>

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

}  // namespace lockstep
