#include "optim/step_items.hpp"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "precision/exact_squares.hpp"
#include "precision/gradient_scan.hpp"
#include "precision/model_parallel.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {
namespace {

constexpr double kNormEpsilon = 1e-6;  // clip_grad_norm_'s

// A parameter and its position in the optimizer, for errors.
struct ParameterAt {
  size_t group;
  size_t index;
  const torch::Tensor& parameter;
  std::string_view optimizer;

  std::string text(std::string_view problem) const {
    return fmt::format("lockstep::{}: parameter {} of group {}, shape {}, {}", optimizer, index,
                       group, shape_text(parameter.sizes()), problem);
  }
  [[noreturn]] void refuse(Code code, std::string_view problem, std::string_view remedy) const {
    throw Error(code, text(problem), fmt::format("{}, or use torch::optim::{}", remedy, optimizer));
  }
};

// Whether this build has the GPU kernels.
#if LOCKSTEP_CUDA
constexpr bool kGpuUpdates = true;
#else
constexpr bool kGpuUpdates = false;
#endif

// Whether elements are at the same offsets in memory in both.
bool same_memory_order(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

void check_master(const ParameterAt& at, const torch::Tensor& master) {
  const torch::Tensor& parameter = at.parameter;
  const auto dtype = parameter.scalar_type();
  if ((dtype != torch::kFloat16 && dtype != torch::kBFloat16) ||
      !same_memory_order(parameter, master)) {
    at.refuse(
        Code::kTensorMismatch,
        fmt::format("{}, is no longer the rounded copy of its master weight", dtype_text(dtype)),
        "make MasterWeights and the optimizer after the module was converted");
  }
}

void check_parameter(const ParameterAt& at, const std::optional<MasterWeights>& masters) {
  const torch::Tensor& parameter = at.parameter;
  if (is_sharded(parameter)) throw Error(Code::kUsage, at.text(kShardedProblem), kShardedRemedy);
  const auto dtype = parameter.scalar_type();
  if (!parameter.device().is_cpu() && !parameter.is_cuda()) {
    at.refuse(Code::kPlacement, fmt::format("is on {}", parameter.device().str()),
              "move the model to the CPU or a GPU");
  }
  if (parameter.is_cuda() && !kGpuUpdates) {
    at.refuse(Code::kEngine, "is on a GPU, and lockstep was built without CUDA",
              "build lockstep with -DLOCKSTEP_CUDA=ON");
  }
  if (masters && masters->holds(parameter)) return check_master(at, masters->of(parameter));
  const bool wide = dtype == torch::kFloat32 || dtype == torch::kFloat64;
  const bool narrow = dtype == torch::kFloat16 || dtype == torch::kBFloat16;
  if (!wide && !(narrow && parameter.is_cuda())) {
    at.refuse(
        Code::kTensorMismatch, fmt::format("is {}", dtype_text(dtype)),
        "keep the weights in float32, compute in lower precision under lockstep::Autocast, or hold "
        "them in lockstep::MasterWeights");
  }
  if (parameter.layout() != torch::kStrided || !parameter.is_non_overlapping_and_dense()) {
    at.refuse(Code::kTensorMismatch, "is not dense in memory",
              "make the parameter from a contiguous() copy");
  }
}

void check_gradient(const ParameterAt& at, const torch::Tensor& gradient) {
  const torch::Tensor& parameter = at.parameter;
  if (gradient.layout() != torch::kStrided) {
    at.refuse(Code::kTensorMismatch, "has a sparse gradient",
              "make the gradient dense (for an embedding, sparse(false))");
  }
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device() || gradient.sizes() != parameter.sizes()) {
    at.refuse(Code::kTensorMismatch,
              fmt::format("{} on {}, has a gradient of shape {}, {} on {}",
                          dtype_text(parameter.scalar_type()), parameter.device().str(),
                          shape_text(gradient.sizes()), dtype_text(gradient.scalar_type()),
                          gradient.device().str()),
              "give it a gradient of its own kind");
  }
}

// Brings the gradient into the weight's memory order. A GPU's kernels read half-precision gradients
// of float32 weights; the CPU's do not.
StepItem make_item(const torch::Tensor& parameter, const torch::Tensor& weight,
                   const torch::Tensor& gradient, size_t group) {
  const bool readable = gradient.dtype() == weight.dtype() || gradient.is_cuda();
  if (readable && gradient.strides() == weight.strides()) {
    return {parameter, weight, gradient, false, group};
  }
  if (readable && same_memory_order(gradient, weight)) {
    return {parameter, weight, gradient.as_strided(weight.sizes(), weight.strides()), false, group};
  }
  torch::Tensor copy =
      torch::empty_strided(weight.sizes(), weight.strides(),
                           readable ? gradient.options() : weight.options().requires_grad(false));
  copy.copy_(gradient);
  return {parameter, weight, copy, true, group};
}

double squares_on_cpu(const std::vector<torch::Tensor>& gradients) {
  const GradientScan scan = scan_gradients(gradients);
  if (scan.first_nonfinite < 0) return scan.sum_of_squares;
  double squares = 0;  // infinity or NaN, as clip_grad_norm_ gives
  for (const torch::Tensor& gradient : gradients) {
    squares += gradient.norm().to(torch::kFloat64).square().item<double>();
  }
  return squares;
}

// Returns a double scalar on `home`, without waiting for GPUs; or exact words, with waiting.
torch::Tensor squares_of(const std::vector<torch::Tensor>& gradients, torch::Device home,
                         bool exact) {
  if (exact) return exact_squares(gradients, home);
  const auto options = torch::device(home).dtype(torch::kDouble);
  if (home.is_cpu()) return torch::full({}, squares_on_cpu(gradients), options);
  torch::Tensor sum = torch::zeros({}, options);
#if LOCKSTEP_CUDA
  std::map<int, std::vector<torch::Tensor>> by_gpu;
  for (const torch::Tensor& gradient : gradients) {
    if (gradient.numel() > 0) by_gpu[gradient.device().index()].push_back(gradient);
  }
  for (const auto& [gpu, here] : by_gpu) {
    const std::vector<int32_t> ids(here.size(), 0);
    const auto part =
        scan_on_gpu(here, ids, /*squares=*/true).sum_of_squares.to(home, /*non_blocking=*/true);
    sum = by_gpu.size() == 1 ? part : sum + part;
  }
#endif
  return sum;
}

template <class Visit>
void for_each_parameter(const ParamGroups& groups, std::string_view optimizer, Visit&& visit) {
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      visit(ParameterAt{group, i, parameters[i], optimizer});
    }
  }
}

// Of the first parameter. A rank without gradients must sum norms on the device that others do.
torch::Device device_of(const ParamGroups& groups) {
  for (const auto& group : groups) {
    if (!group.params().empty()) return group.params().front().device();
  }
  return torch::kCPU;
}

}  // namespace

void check_extras(const StepExtras& extras) {
  if (!extras.max_norm || *extras.max_norm >= 0) return;
  throw Error(Code::kUsage, fmt::format("max_norm is {}", *extras.max_norm),
              "give the largest norm that gradients may have, 0 or more");
}

void check_parameters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                      std::string_view optimizer) {
  std::optional<torch::Device> first;
  std::unordered_map<const c10::TensorImpl*, std::pair<size_t, size_t>> seen;  // group, index
  for_each_parameter(groups, optimizer, [&](const ParameterAt& at) {
    check_parameter(at, masters);
    // A parameter listed twice would be updated by two threads at once.
    const auto [known, is_new] =
        seen.emplace(at.parameter.unsafeGetTensorImpl(), std::pair(at.group, at.index));
    if (!is_new) {
      at.refuse(
          Code::kUsage,
          fmt::format("is parameter {} of group {} too", known->second.second, known->second.first),
          "give it to one group, once");
    }
    const auto device = at.parameter.device();
    if (!first) first = device;
    if (first->type() != device.type()) {
      at.refuse(Code::kPlacement,
                fmt::format("is on {} and others are on {}", device.str(), first->str()),
                "make one optimizer for the CPU and one for the GPUs");
    }
  });
}

StepItems::StepItems(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                     std::string_view optimizer)
    : masters_(masters) {
  check_parameters(groups, masters, optimizer);  // set_data() may have changed one
  for_each_parameter(groups, optimizer, [&](const ParameterAt& at) {
    const torch::Tensor& gradient = at.parameter.grad();
    if (!gradient.defined()) {
      if (is_planted(Mutation::kFrozenUpdated)) at.parameter.mul_(1 - 1e-3);
      return;
    }
    check_gradient(at, gradient);
    const torch::Tensor weight = masters ? masters->of(at.parameter) : at.parameter;
    items_.push_back(make_item(at.parameter, weight, gradient, at.group));
  });
}

ScaledGradients StepItems::with_squares(const ScaledGradients& scaled, const ParamGroups& groups,
                                        const StepExtras& extras) const {
  ScaledGradients known = scaled;
  if (!extras.max_norm || scaled.sum_of_squares.defined()) return known;
  const ModelParallelGroup model(groups, extras.model_parallel);
  std::vector<std::vector<torch::Tensor>> gradients(model.parts());  // [part]
  for (const StepItem& item : items_) {
    gradients[model.part_of(item.parameter)].push_back(item.gradient);
  }
  const torch::Device home = empty() ? device_of(groups) : items_[0].weight.device();
  std::vector<torch::Tensor> parts;
  for (const auto& part : gradients) parts.push_back(squares_of(part, home, model.same_bits()));
  known.sum_of_squares = model.sum(std::move(parts));
  return known;
}

torch::Tensor clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                              const std::optional<Communicator>& model_parallel) {
  check_extras({.max_norm = max_norm});
  const torch::NoGradGuard no_grad;
  const ParamGroups groups = {torch::optim::OptimizerParamGroup(parameters)};
  const ModelParallelGroup model(groups, model_parallel);
  std::vector<std::vector<torch::Tensor>> gradients(model.parts());  // [part]
  std::unordered_map<const c10::TensorImpl*, bool> seen;
  for (const torch::Tensor& parameter : parameters) {
    if (is_sharded(parameter)) {
      throw Error(Code::kUsage,
                  fmt::format("clip_grad_norm_: a parameter of shape {} {}",
                              shape_text(parameter.sizes()), kShardedProblem),
                  kShardedRemedy);
    }
    torch::Tensor gradient = parameter.grad();
    if (!gradient.defined() || !seen.emplace(parameter.unsafeGetTensorImpl(), true).second)
      continue;
    if (gradient.is_sparse()) {  // rows of one index are one row in the norm
      parameter.mutable_grad() = gradient.coalesce();
      gradient = parameter.grad()._values();
    }
    gradients[model.part_of(parameter)].push_back(gradient);
  }
  const torch::Device home =
      parameters.empty() ? torch::Device(torch::kCPU) : parameters[0].device();
  std::vector<torch::Tensor> parts;
  for (const auto& part : gradients) parts.push_back(squares_of(part, home, model.same_bits()));
  const torch::Tensor norm = model.sum(std::move(parts)).sqrt();
  const torch::Tensor factor = (max_norm / (norm + kNormEpsilon)).clamp_max(1);
  for (const auto& part : gradients) {
    for (const torch::Tensor& gradient : part) {
      gradient.mul_(factor.to(gradient.device(), gradient.scalar_type()));
    }
  }
  return norm;
}

torch::Tensor gradient_norm(const ScaledGradients& scaled, const StepExtras& extras) {
  if (!extras.max_norm) return {};
  return torch::full({}, std::sqrt(scaled.sum_of_squares.item<double>()) * scaled.inverse_scale,
                     torch::kDouble);
}

torch::Tensor norm_without_gradients(const ScaledGradients& scaled, const StepExtras& extras) {
  if (!extras.max_norm) return {};
  const bool skipped = scaled.found_inf.defined() && scaled.found_inf.item<float>() != 0;
  return skipped ? torch::Tensor() : gradient_norm(scaled, extras);
}

double gradient_factor(const ScaledGradients& scaled, const StepExtras& extras,
                       const torch::Tensor& norm) {
  if (is_planted(Mutation::kGradientsNotUnscaled)) return 1;
  if (!extras.max_norm) return scaled.inverse_scale;
  const double coefficient = *extras.max_norm / (norm.item<double>() + kNormEpsilon);
  return scaled.inverse_scale * (coefficient > 1 ? 1 : coefficient);
}

void StepItems::round_masters() const {
  if (is_planted(Mutation::kMasterNotWritten)) return;
  for (const StepItem& item : items_) {
    if (item.has_master()) item.parameter.copy_(item.weight);
  }
}

void StepItems::finish(bool gradients_changed, const StepExtras& extras) const {
  for (const StepItem& item : items_) {
    item.parameter.unsafeGetTensorImpl()->bump_version();
    if (item.has_master()) masters_->note_rounded(item.parameter);
    torch::Tensor& gradient = item.parameter.mutable_grad();
    if (extras.zero_grad) {
      gradient.reset();
    } else if (gradients_changed && at::has_internal_overlap(gradient) == at::MemOverlap::Yes) {
      gradient = item.gradient.to(item.parameter.dtype());  // an expanded one cannot be written to
    } else if (gradients_changed && item.is_copy) {
      gradient.copy_(item.gradient);
    } else if (gradients_changed) {
      gradient.unsafeGetTensorImpl()->bump_version();
    }
  }
}

RecordedUpdate::RecordedUpdate(const torch::optim::Optimizer& optimizer,
                               const std::optional<MasterWeights>& masters)
    : optimizer_(optimizer), masters_(masters) {
  if (auto* recorder = StepRecorder::of_process()) recorder->begin_update(optimizer_);
}

void RecordedUpdate::end(const ScaledGradients& gradients, const StepExtras& extras,
                         const torch::Tensor& norm) const {
  auto* recorder = StepRecorder::of_process();
  if (recorder == nullptr) return;
  ScaledGradients known = gradients;
  if (known.scale.defined()) known.inverse_scale = 1 / known.scale.item<double>();
  StepExtras used = extras;
  if (!norm.defined()) used.max_norm.reset();  // the step was skipped
  recorder->end_update(optimizer_, gradient_factor(known, used, norm),
                       [this](const auto& each) { return masters_ ? masters_->of(each) : each; });
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
