#include "optim/common.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <unordered_set>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr const char* kMastersKey = "lockstep_masters";

// Held parameters, with their number among them.
template <class Visit>
void for_each_held(const Groups& groups, const MasterWeights& masters, Visit&& visit) {
  int number = 0;
  for (const auto& group : groups) {
    for (const torch::Tensor& parameter : group.params()) {
      if (masters.holds(parameter)) visit(std::to_string(number++), parameter);
    }
  }
}

}  // namespace

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

void save_masters(const Groups& groups, const std::optional<MasterWeights>& masters,
                  torch::serialize::OutputArchive& archive) {
  if (!masters) return;
  torch::serialize::OutputArchive weights(archive.compilation_unit());
  for_each_held(groups, *masters, [&](const std::string& key, const torch::Tensor& parameter) {
    weights.write(key, masters->of(parameter), /*is_buffer=*/true);
  });
  archive.write(kMastersKey, weights);
}

std::vector<torch::Tensor> read_masters(const Groups& groups,
                                        const std::optional<MasterWeights>& masters,
                                        torch::serialize::InputArchive& archive) {
  if (!masters) return {};
  torch::serialize::InputArchive weights;
  if (!archive.try_read(kMastersKey, weights)) {
    throw Error(Code::kFileFormat, "the saved optimizer has no master weights",
                "load it into an optimizer without masters; or load the module only, then call "
                "MasterWeights::take_from_parameters()");
  }
  std::vector<torch::Tensor> all;
  for_each_held(groups, *masters, [&](const std::string& key, const torch::Tensor& parameter) {
    const torch::Tensor master = masters->of(parameter);
    torch::Tensor saved;
    if (!weights.try_read(key, saved, /*is_buffer=*/true) || saved.sizes() != master.sizes()) {
      throw Error(Code::kTensorMismatch,
                  fmt::format("the saved optimizer has no master weight {} of shape {}", key,
                              shape_text(master.sizes())),
                  "load a state that was saved for the same model, with the parameters in the same "
                  "order");
    }
    all.push_back(saved);
  });
  return all;
}

void put_masters(const Groups& groups, const std::optional<MasterWeights>& masters,
                 const std::vector<torch::Tensor>& saved) {
  if (!masters) return;
  const torch::NoGradGuard no_grad;
  size_t next = 0;
  for_each_held(groups, *masters, [&](const std::string&, const torch::Tensor& parameter) {
    masters->of(parameter).copy_(saved[next++]);
    masters->round(parameter);
  });
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
