#include "gradients/trained_parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "base/mutation.hpp"
#include "device/parameter_map.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

ParameterMap<bool>& tied_parameters() {
  static ParameterMap<bool> map;
  return map;
}

}  // namespace

bool is_tied(const torch::Tensor& parameter) {
  return tied_parameters().get(parameter).has_value();
}

std::vector<TrainedParameter> trained_in(const torch::nn::Module& module) {
  std::vector<TrainedParameter> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
      if (is_planted(Mutation::kTiedDividedTwice)) tied_parameters().set(tensor, true);
      continue;
    }
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

void AccumulationWindow::add_micro_step() {
  ++micro_steps_;
  marks_ = read_marks();
}

void AccumulationWindow::forward_ended() {
  if (micro_steps_ > 0) marks_ = read_marks();
}

void AccumulationWindow::follow(int64_t micro_steps) {
  if (micro_steps_ == 0) marks_ = read_marks();
  micro_steps_ = micro_steps;
}

bool AccumulationWindow::gradients_dropped() const {
  return std::none_of(parameters_.begin(), parameters_.end(),
                      [](const TrainedParameter& each) { return each.tensor.grad().defined(); });
}

bool AccumulationWindow::gradients_cleared() const {
  return std::none_of(parameters_.begin(), parameters_.end(), [](const TrainedParameter& each) {
    torch::Tensor gradient = each.tensor.grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient._values();
    return gradient.defined() && gradient.ne(0).any().item<bool>();
  });
}

std::vector<AccumulationWindow::Mark> AccumulationWindow::read_marks() const {
  std::vector<Mark> marks;
  marks.reserve(parameters_.size());
  for (const auto& [name, tensor] : parameters_) {
    Mark& mark = marks.emplace_back();
    mark.version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    if (!tensor.is_cpu() || tensor.numel() == 0) continue;
    if (tensor.scalar_type() == torch::kFloat) mark.first = *tensor.data_ptr<float>();
    if (tensor.scalar_type() == torch::kDouble) mark.first = *tensor.data_ptr<double>();
    if (tensor.scalar_type() == torch::kBFloat16) mark.first = *tensor.data_ptr<c10::BFloat16>();
    if (tensor.scalar_type() == torch::kHalf) mark.first = *tensor.data_ptr<c10::Half>();
    if (std::isnan(mark.first)) mark.first = 0;  // it would differ from itself
  }
  return marks;
}

}  // namespace lockstep
