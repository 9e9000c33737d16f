#include "precision/optimizer_gradients.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_set>
#include <utility>

#include "lockstep/error.hpp"
#include "precision/gradient_scan.hpp"

namespace lockstep {
namespace {

using Indices = std::vector<int64_t>;  // of gradients

std::vector<torch::Tensor> chosen(const OptimizerGradients& gradients, const Indices& indices) {
  std::vector<torch::Tensor> result;
  result.reserve(indices.size());
  for (const int64_t i : indices) result.push_back(gradients.gradients[static_cast<size_t>(i)]);
  return result;
}

// [gradient] 0 where all is finite, not a number otherwise. The largest magnitude tells: it is NaN
// where any element is, and unlike a sum it overflows only where an element did.
torch::Tensor marks_of(const std::vector<torch::Tensor>& gradients) {
  const auto largest = at::_foreach_norm(gradients, std::numeric_limits<double>::infinity());
  return at::stack(largest).mul(0).to(torch::kFloat);
}

GpuFinding unscale_on_gpu(const OptimizerGradients& gradients, torch::Device device,
                          const std::map<torch::ScalarType, Indices>& by_dtype,
                          const torch::Tensor& inverse) {
  GpuFinding finding;
  finding.found_inf = torch::zeros({}, torch::TensorOptions(device).dtype(torch::kFloat));
  std::vector<torch::Tensor> marks;
  for (const auto& [dtype, indices] : by_dtype) {
    const auto tensors = chosen(gradients, indices);
    marks.push_back(marks_of(tensors));
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, finding.found_inf, inverse);
    finding.gradients.insert(finding.gradients.end(), indices.begin(), indices.end());
  }
  // argmax takes the first NaN for the largest.
  finding.first = (marks.size() == 1 ? marks[0] : at::cat(marks)).argmax().to(torch::kFloat);
  return finding;
}

}  // namespace

void ParameterNames::learn(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    names_[item.value().unsafeGetTensorImpl()] = item.key();
  }
}

std::string ParameterNames::of(const ParameterPlace& place) const {
  const auto found = names_.find(place.parameter);
  return found != names_.end() ? found->second
                               : fmt::format("parameter {} of group {}", place.index, place.group);
}

OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer, const ParameterNames& names) {
  OptimizerGradients result;
  std::vector<ParameterPlace> places;
  // libtorch's parameters() lists a shared one at each of its owners: it is unscaled once.
  std::unordered_set<const c10::TensorImpl*> seen;
  size_t group_index = 0;
  for (auto& group : optimizer.param_groups()) {
    const auto& parameters = group.params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor gradient = parameters[i].grad();
      const ParameterPlace place{group_index, i, parameters[i].unsafeGetTensorImpl()};
      if (!gradient.defined() || !seen.insert(place.parameter).second) continue;
      if (gradient.scalar_type() == torch::kHalf) {
        throw Error(Code::kTensorMismatch, fmt::format("{} has fp16 gradients", names.of(place)),
                    "keep parameters in fp32 and let Autocast choose where fp16 is used");
      }
      if (gradient.is_sparse()) gradient = gradient._values();
      if (gradient.is_complex()) gradient = torch::view_as_real(gradient);
      if (gradient.numel() == 0) continue;
      result.all_on_cpu = result.all_on_cpu && gradient.is_cpu();
      result.gradients.push_back(std::move(gradient));
      places.push_back(place);
    }
    ++group_index;
  }
  result.places = std::make_shared<const std::vector<ParameterPlace>>(std::move(places));
  return result;
}

void Finding::bring_to_host() {
  for (const auto& gpu : std::exchange(on_gpus, {})) {
    if (gpu.found_inf.item<float>() == 0) continue;
    const int64_t first = gpu.gradients[static_cast<size_t>(gpu.first.item<float>())];
    first_nonfinite = first_nonfinite < 0 ? first : std::min(first_nonfinite, first);
  }
}

Finding unscale_in_place(const OptimizerGradients& gradients, const LossScale& scale) {
  const torch::NoGradGuard no_grad;
  Indices on_cpu;
  std::map<int, std::map<torch::ScalarType, Indices>> on_gpus;  // [GPU][dtype]
  for (size_t i = 0; i < gradients.gradients.size(); ++i) {
    const auto& gradient = gradients.gradients[i];
    auto& indices =
        gradient.is_cpu() ? on_cpu : on_gpus[gradient.device().index()][gradient.scalar_type()];
    indices.push_back(static_cast<int64_t>(i));
  }
  Finding finding;
  finding.places = gradients.places;
  if (!on_cpu.empty()) {
    const int64_t first = unscale_gradients(chosen(gradients, on_cpu), scale.inverse());
    if (first >= 0) finding.first_nonfinite = on_cpu[static_cast<size_t>(first)];
  }
  for (const auto& [gpu, by_dtype] : on_gpus) {
    const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(gpu));
    finding.on_gpus.push_back(
        unscale_on_gpu(gradients, device, by_dtype, scale.inverse_on(device)));
  }
  return finding;
}

double sum_of_squares(const OptimizerGradients& gradients) {
  if (gradients.all_on_cpu) return scan_gradients(gradients.gradients).sum_of_squares;
  double sum = 0;
  for (const auto& gradient : gradients.gradients) {
    sum += gradient.detach().to(torch::kDouble).square().sum().item<double>();
  }
  return sum;
}

}  // namespace lockstep
