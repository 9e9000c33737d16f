#include "optim/step_items.hpp"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "optim/state_memory.hpp"
#include "precision/gradient_scan.hpp"

namespace lockstep {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

constexpr double kNormEpsilon = 1e-6;  // clip_grad_norm_'s

// Where a parameter stands, for errors.
struct Place {
  size_t group;
  size_t index;
  const torch::Tensor& parameter;
  std::string_view optimizer;

  [[noreturn]] void refuse(Code code, std::string_view problem, std::string_view remedy) const {
    throw Error(code,
                fmt::format("lockstep::{}: parameter {} of group {}, shape {}, {}", optimizer,
                            index, group, shape_text(parameter.sizes()), problem),
                fmt::format("{}, or use torch::optim::{}", remedy, optimizer));
  }
};

void check_parameter(const Place& place) {
  const torch::Tensor& parameter = place.parameter;
  const auto dtype = parameter.scalar_type();
  if (!parameter.device().is_cpu() && !parameter.is_cuda()) {
    place.refuse(Code::kPlacement, fmt::format("is on {}", parameter.device().str()),
                 "move the model to the CPU or a GPU");
  }
  if (parameter.is_cuda() && !compat::kFusedCudaUpdates) {
    place.refuse(Code::kEngine, "is on a GPU, and this libtorch has no fused updates for GPUs",
                 "build with libtorch 2.4 or later");
  }
  const bool wide = dtype == torch::kFloat32 || dtype == torch::kFloat64;
  const bool narrow = dtype == torch::kFloat16 || dtype == torch::kBFloat16;
  if (!wide && !(narrow && parameter.is_cuda())) {
    place.refuse(Code::kTensorMismatch, fmt::format("is {}", dtype_text(dtype)),
                 "keep the weights in float32 and compute in less under lockstep::Autocast");
  }
  if (parameter.layout() != torch::kStrided || !parameter.is_non_overlapping_and_dense()) {
    place.refuse(Code::kTensorMismatch, "is not dense in memory",
                 "make the parameter from a contiguous() copy");
  }
}

void check_gradient(const Place& place, const torch::Tensor& gradient) {
  const torch::Tensor& parameter = place.parameter;
  if (gradient.layout() != torch::kStrided) {
    place.refuse(Code::kTensorMismatch, "has a sparse gradient",
                 "make the gradient dense (for an embedding, sparse(false))");
  }
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device() || gradient.sizes() != parameter.sizes()) {
    place.refuse(Code::kTensorMismatch,
                 fmt::format("{} on {}, has a gradient of shape {}, {} on {}",
                             dtype_text(parameter.scalar_type()), parameter.device().str(),
                             shape_text(gradient.sizes()), dtype_text(gradient.scalar_type()),
                             gradient.device().str()),
                 "give it a gradient of its own kind");
  }
}

// The gradient as the weight lies in memory.
StepItem make_item(const torch::Tensor& weight, const torch::Tensor& gradient, size_t group) {
  if (gradient.strides() == weight.strides()) return {weight, gradient, false, group};
  if (same_memory_order(gradient, weight)) {
    return {weight, gradient.as_strided(weight.sizes(), weight.strides()), false, group};
  }
  torch::Tensor copy = torch::empty_strided(weight.sizes(), weight.strides(), gradient.options());
  copy.copy_(gradient);
  return {weight, copy, true, group};
}

template <class Visit>
void for_each_parameter(const Groups& groups, std::string_view optimizer, Visit&& visit) {
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      visit(Place{group, i, parameters[i], optimizer});
    }
  }
}

double checked_max_norm(const StepExtras& extras) {
  const double max_norm = *extras.max_norm;
  if (!(max_norm >= 0)) {
    throw Error(Code::kUsage, fmt::format("max_norm is {}", max_norm),
                "give the largest length that gradients may have, 0 or more");
  }
  return max_norm;
}

}  // namespace

void check_parameters(const Groups& groups, std::string_view optimizer) {
  std::optional<torch::Device> first;
  std::unordered_map<const c10::TensorImpl*, std::pair<size_t, size_t>> seen;  // group, index
  for_each_parameter(groups, optimizer, [&](const Place& place) {
    check_parameter(place);
    // Threads would update it at the same time.
    const auto [known, is_new] =
        seen.emplace(place.parameter.unsafeGetTensorImpl(), std::pair(place.group, place.index));
    if (!is_new) {
      place.refuse(
          Code::kUsage,
          fmt::format("is parameter {} of group {} too", known->second.second, known->second.first),
          "give it to one group, once");
    }
    const auto device = place.parameter.device();
    if (!first) first = device;
    if (first->type() != device.type()) {
      place.refuse(Code::kPlacement,
                   fmt::format("is on {} and others are on {}", device.str(), first->str()),
                   "make one optimizer for the CPU and one for the GPUs");
    }
  });
}

StepItems::StepItems(const Groups& groups, std::string_view optimizer) {
  check_parameters(groups, optimizer);  // set_data() may have changed one since the last step
  for_each_parameter(groups, optimizer, [&](const Place& place) {
    const torch::Tensor& gradient = place.parameter.grad();
    if (!gradient.defined()) return;
    check_gradient(place, gradient);
    items_.push_back(make_item(place.parameter, gradient, place.group));
  });
}

std::vector<torch::Tensor> StepItems::weights() const {
  std::vector<torch::Tensor> tensors;
  tensors.reserve(items_.size());
  for (const StepItem& item : items_) tensors.push_back(item.weight);
  return tensors;
}

std::vector<torch::Tensor> StepItems::gradients() const {
  std::vector<torch::Tensor> tensors;
  tensors.reserve(items_.size());
  for (const StepItem& item : items_) tensors.push_back(item.gradient);
  return tensors;
}

double StepItems::gradient_factor(const ScaledGradients& scaled, const StepExtras& extras) const {
  if (!extras.max_norm) return scaled.inverse_scale;
  const double max_norm = checked_max_norm(extras);
  double squares = 0;
  if (scaled.sum_of_squares.defined()) {
    squares = scaled.sum_of_squares.item<double>();
  } else {
    const auto all = gradients();
    const GradientScan scan = scan_gradients(all);
    squares = scan.sum_of_squares;
    if (scan.first_nonfinite >= 0) {  // infinity or NaN, as clip_grad_norm_ would find
      squares = 0;
      for (const torch::Tensor& gradient : all) {
        squares += gradient.norm().to(torch::kFloat64).square().item<double>();
      }
    }
  }
  const double coefficient = max_norm / (std::sqrt(squares) * scaled.inverse_scale + kNormEpsilon);
  return scaled.inverse_scale * (coefficient > 1 ? 1 : coefficient);
}

torch::Tensor StepItems::gradient_divisor(const ScaledGradients& scaled,
                                          const StepExtras& extras) const {
  const auto home = items_[0].weight.device();
  if (!extras.max_norm) {
    if (scaled.inverse_scale == 1) return {};
    return torch::full({}, 1 / scaled.inverse_scale, torch::device(home).dtype(torch::kFloat32));
  }
  const double max_norm = checked_max_norm(extras);
  torch::Tensor squares = scaled.sum_of_squares;
  if (!squares.defined()) {
    for (const CudaBatch& batch : cuda_batches()) {
      const auto norms = torch::stack(at::_foreach_norm(gradients(batch), 2));
      const auto sum = norms.to(torch::kFloat64).square().sum().to(home, /*non_blocking=*/true);
      squares = squares.defined() ? squares + sum : sum;
    }
    if (!squares.defined()) return {};  // all gradients are empty
  }
  const auto norm = squares.sqrt() * scaled.inverse_scale;
  const auto shrink = ((norm + kNormEpsilon) / max_norm).clamp_min(1);
  return (shrink / scaled.inverse_scale).to(torch::kFloat32);
}

std::vector<CudaBatch> StepItems::cuda_batches() const {
  std::map<std::tuple<size_t, c10::DeviceIndex, torch::ScalarType>, CudaBatch> batches;
  for (size_t i = 0; i < items_.size(); ++i) {
    const StepItem& item = items_[i];
    if (item.weight.numel() == 0) continue;
    auto& batch = batches[{item.group, item.weight.device().index(), item.weight.scalar_type()}];
    batch.group = item.group;
    batch.items.push_back(i);
  }
  std::vector<CudaBatch> list;
  for (auto& [kind, batch] : batches) list.push_back(std::move(batch));
  return list;
}

std::vector<torch::Tensor> StepItems::weights(const CudaBatch& batch) const {
  std::vector<torch::Tensor> tensors;
  for (const size_t i : batch.items) tensors.push_back(items_[i].weight);
  return tensors;
}

std::vector<torch::Tensor> StepItems::gradients(const CudaBatch& batch) const {
  std::vector<torch::Tensor> tensors;
  for (const size_t i : batch.items) tensors.push_back(items_[i].gradient);
  return tensors;
}

compat::FusedScaling StepItems::scaling(const CudaBatch& batch, const torch::Tensor& divisor,
                                        const torch::Tensor& found_inf) const {
  const auto device = items_[batch.items[0]].weight.device();
  const auto here = [&](const torch::Tensor& scalar) {
    return scalar.defined() ? scalar.to(device, /*non_blocking=*/true) : scalar;
  };
  return {here(divisor), here(found_inf)};
}

void StepItems::finish(bool gradients_changed, const StepExtras& extras) const {
  for (const StepItem& item : items_) {
    item.weight.unsafeGetTensorImpl()->bump_version();
    torch::Tensor& gradient = item.weight.mutable_grad();
    if (extras.zero_grad) {
      gradient.reset();
    } else if (gradients_changed && at::has_internal_overlap(gradient) == at::MemOverlap::Yes) {
      gradient = item.gradient;  // an expanded one cannot be written to
    } else if (gradients_changed && item.is_copy) {
      gradient.copy_(item.gradient);
    } else if (gradients_changed) {
      gradient.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace lockstep
