#include "optim/common.hpp"

#include <torch/torch.h>

#include <unordered_set>

namespace lockstep {

std::vector<torch::Tensor> without_repeats(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> once;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const torch::Tensor& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) once.push_back(parameter);
  }
  return once;
}

std::vector<torch::optim::OptimizerParamGroup> without_repeats(
    std::vector<torch::optim::OptimizerParamGroup> groups) {
  for (auto& group : groups) group.params() = without_repeats(group.params());
  return groups;
}

torch::Tensor run_closure(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

void zero_gradients(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    bool set_to_none) {
  const torch::NoGradGuard no_grad;
  for (const auto& group : groups) {
    for (const torch::Tensor& parameter : group.params()) {
      torch::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
      } else {
        gradient.detach_();
        gradient.zero_();
      }
    }
  }
}

bool skips_on_cpu(const StepItems& items, const ScaledGradients& gradients) {
  return !items.on_cuda() && gradients.found_inf.defined() &&
         gradients.found_inf.item<float>() != 0;
}

UpdatePiece piece_of(const StepItem& item, const torch::Tensor& momentum,
                     const torch::Tensor& variance) {
  const auto address = [](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  };
  return {item.weight.data_ptr(), item.gradient.data_ptr(), address(momentum), address(variance),
          item.weight.numel()};
}

Dtype dtype_of(const StepItem& item) {
  return item.weight.scalar_type() == torch::kFloat64 ? Dtype::kF64 : Dtype::kF32;
}

}  // namespace lockstep
