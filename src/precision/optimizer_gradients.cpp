#include "precision/optimizer_gradients.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "device/capture.hpp"
#include "device/parameter_notes.hpp"
#include "lockstep/error.hpp"
#include "precision/gradient_scan.hpp"

namespace lockstep {
namespace {

// The gradients of one device.
struct DeviceGradients : OptimizerGradients {
  int32_t id_of(int64_t index) const { return index < 0 ? -1 : ids[static_cast<size_t>(index)]; }
};

struct ByDevice {
  explicit ByDevice(const OptimizerGradients& all) {
    for (size_t i = 0; i < all.gradients.size(); ++i) {
      const auto device = all.gradients[i].device();
      (device.is_cpu() ? cpu : gpus[device.index()]).add(all, i);
    }
  }
  DeviceGradients cpu;
  std::map<int, DeviceGradients> gpus;  // [GPU]
};

GpuScan scan_device(const DeviceGradients& part, [[maybe_unused]] bool squares) {
#if LOCKSTEP_CUDA
  return scan_on_gpu(part.gradients, part.ids, squares);
#else
  throw Error(Code::kEngine,
              fmt::format("GradScaler: gradients on {}, and lockstep was built without CUDA",
                          part.gradients[0].device().str()),
              "build lockstep with -DLOCKSTEP_CUDA=ON");
#endif
}

void unscale_device(const DeviceGradients& part, const torch::Tensor& inverse) {
  std::map<torch::ScalarType, std::vector<torch::Tensor>> by_dtype;
  for (const auto& gradient : part.gradients) by_dtype[gradient.scalar_type()].push_back(gradient);
  auto found = torch::zeros({}, inverse.options());  // ignored: the scan has found them by name
  for (const auto& [dtype, gradients] : by_dtype) {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  }
}

[[noreturn]] void refuse_half(const std::string& name, bool has_master) {
  if (has_master) {
    throw Error(Code::kTensorMismatch,
                fmt::format("{} has fp16 gradients, which unscale_() would underflow", name),
                "call step() without unscale_(): it multiplies in float32, and clips where it is "
                "given max_norm");
  }
  throw Error(Code::kTensorMismatch, fmt::format("{} has fp16 gradients", name),
              "keep parameters in fp32 and let Autocast choose where fp16 is used, or hold their "
              "weights in lockstep::MasterWeights");
}

}  // namespace

void ParameterNames::learn(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    names_[item.value().unsafeGetTensorImpl()] = item.key();
  }
}

int32_t ParameterNames::id_of(const ParameterPosition& position) {
  const auto [found, is_new] = ids_.emplace(position, static_cast<int32_t>(positions_.size()));
  if (is_new) positions_.push_back(position);
  return found->second;
}

std::string ParameterNames::of(int32_t id) const {
  const ParameterPosition& position = positions_[static_cast<size_t>(id)];
  const auto found = names_.find(position.parameter);
  return found != names_.end()
             ? found->second
             : fmt::format("parameter {} of group {}", position.index, position.group);
}

void OptimizerGradients::add(const OptimizerGradients& from, size_t i) {
  gradients.push_back(from.gradients[i]);
  ids.push_back(from.ids[i]);
  parameters.push_back(from.parameters[i]);
}

bool OptimizerGradients::all_on_cpu() const {
  return std::all_of(gradients.begin(), gradients.end(), [](const auto& g) { return g.is_cpu(); });
}

bool OptimizerGradients::all_on_one_gpu() const {
  return !gradients.empty() && gradients[0].is_cuda() &&
         std::all_of(gradients.begin(), gradients.end(),
                     [&](const auto& g) { return g.device() == gradients[0].device(); });
}

OptimizerGradients gradients_of(torch::optim::Optimizer& optimizer, ParameterNames& names,
                                const FusedOptimizer* fused) {
  const auto* masters = dynamic_cast<const FusedOptimizer*>(&optimizer);
  OptimizerGradients result;
  // parameters() lists a shared one at each of its owners, and it must be unscaled once.
  std::unordered_set<const c10::TensorImpl*> seen;
  size_t group_index = 0;
  for (auto& group : optimizer.param_groups()) {
    const auto& parameters = group.params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor gradient = parameters[i].grad();
      const ParameterPosition position{group_index, i, parameters[i].unsafeGetTensorImpl()};
      if (is_sharded(parameters[i])) {
        throw Error(
            Code::kUsage,
            fmt::format("GradScaler: {} {}", names.of(names.id_of(position)), kShardedProblem),
            kShardedRemedy);
      }
      if (!gradient.defined() || !seen.insert(position.parameter).second) continue;
      if (gradient.scalar_type() == torch::kHalf) {
        const bool has_master = masters != nullptr && masters->has_master(parameters[i]);
        if (!has_master || fused == nullptr)
          refuse_half(names.of(names.id_of(position)), has_master);
      }
      if (gradient.is_sparse()) gradient = gradient._values();
      if (gradient.is_complex()) gradient = torch::view_as_real(gradient);
      if (gradient.numel() == 0) continue;
      result.gradients.push_back(std::move(gradient));
      result.ids.push_back(names.id_of(position));
      result.parameters.push_back(parameters[i]);
    }
    ++group_index;
  }
  return result;
}

void Finding::bring_to_host() {
  if (on_gpus.empty()) return;
  require_not_capturing(
      "a GradScaler's decision on the host",
      "use one lockstep::Sgd or AdamW whose parameters are all on one GPU, without model_parallel");
  for (const auto& gpu : std::exchange(on_gpus, {})) {
    sum_of_squares += gpu.sum_of_squares.item<double>();
    const auto theirs = gpu.first.item<int32_t>();
    if (theirs >= 0) first = first < 0 ? theirs : std::min(first, theirs);
  }
}

Finding scan(const OptimizerGradients& gradients, bool squares) {
  const ByDevice parts(gradients);
  Finding finding;
  if (!parts.cpu.gradients.empty()) {
    const GradientScan found = scan_gradients(parts.cpu.gradients);
    finding.first = parts.cpu.id_of(found.first_nonfinite);
    finding.sum_of_squares = found.sum_of_squares;
  }
  for (const auto& [gpu, part] : parts.gpus) finding.on_gpus.push_back(scan_device(part, squares));
  return finding;
}

Finding unscale_in_place(const OptimizerGradients& gradients, const LossScale& scale) {
  const torch::NoGradGuard no_grad;
  const ByDevice parts(gradients);
  Finding finding;
  if (!parts.cpu.gradients.empty()) {
    finding.first = parts.cpu.id_of(unscale_gradients(parts.cpu.gradients, scale.inverse()));
  }
  for (const auto& [gpu, part] : parts.gpus) {
    finding.on_gpus.push_back(scan_device(part, /*squares=*/false));
    unscale_device(part, scale.inverse_on(part.gradients[0].device()));
  }
  return finding;
}

}  // namespace lockstep
