#include "optim/optimizer_state.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <map>
#include <unordered_set>
#include <utility>

#include "device/capture.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

constexpr const char* kMastersKey = "lockstep_masters";

// Visits the parameters that have masters, with their number among these as the key.
template <class Visit>
void for_each_held(const ParamGroups& groups, const MasterWeights& masters, Visit&& visit) {
  int number = 0;
  for (const auto& group : groups) {
    for (const torch::Tensor& parameter : group.params()) {
      if (masters.holds(parameter)) visit(std::to_string(number++), parameter);
    }
  }
}

constexpr int64_t kAlignBytes = 64;  // a cache line, and a vector of the widest instructions

torch::Tensor empty_like_weight(const torch::Tensor& weight) {
  return torch::empty_strided(weight.sizes(), weight.strides(),
                              weight.options().requires_grad(false));
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

ParamGroups without_repeats(ParamGroups groups) {
  for (auto& group : groups) group.params() = without_repeats(group.params());
  return groups;
}

torch::Tensor run_closure(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

void zero_gradients(const ParamGroups& groups, bool set_to_none) {
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

void save_masters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                  torch::serialize::OutputArchive& archive) {
  if (!masters) return;
  torch::serialize::OutputArchive weights(archive.compilation_unit());
  for_each_held(groups, *masters, [&](const std::string& key, const torch::Tensor& parameter) {
    weights.write(key, masters->of(parameter), /*is_buffer=*/true);
  });
  archive.write(kMastersKey, weights);
}

std::vector<torch::Tensor> read_masters(const ParamGroups& groups,
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

void put_masters(const ParamGroups& groups, const std::optional<MasterWeights>& masters,
                 const std::vector<torch::Tensor>& saved) {
  if (!masters) return;
  const torch::NoGradGuard no_grad;
  size_t next = 0;
  for_each_held(groups, *masters, [&](const std::string&, const torch::Tensor& parameter) {
    masters->of(parameter).copy_(saved[next++]);
    masters->round(parameter);
  });
}

std::vector<torch::Tensor> zeros_like_all(std::span<const torch::Tensor> models) {
  std::vector<torch::Tensor> made(models.size());
  if (models.empty()) return made;
  require_not_capturing("an optimizer's first step, which makes its state,",
                        "let a step run before it is captured (CaptureOptions::warmup)");
  std::map<std::pair<torch::ScalarType, std::string>, std::vector<size_t>> alike;
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].numel() == 0) {
      made[i] = empty_like_weight(models[i]);
    } else {
      alike[{models[i].scalar_type(), models[i].device().str()}].push_back(i);
    }
  }
  for (const auto& [kind, indices] : alike) {
    const auto options = models[indices[0]].options().requires_grad(false);
    const auto width = static_cast<int64_t>(models[indices[0]].element_size());
    const auto padded_bytes = [&](size_t i) {
      return (models[i].numel() * width + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    };
    int64_t bytes = 0;
    for (const size_t i : indices) bytes += padded_bytes(i);
    const torch::Tensor flat = torch::zeros({bytes / width}, options);
    auto* address = static_cast<char*>(flat.data_ptr());
    for (const size_t i : indices) {
      made[i] = torch::from_blob(
          address, models[i].sizes(), models[i].strides(), [flat](void*) {}, options);
      address += padded_bytes(i);
    }
  }
  return made;
}

torch::Tensor fit_state(const torch::Tensor& state, const torch::Tensor& weight,
                        std::string_view what) {
  if (state.sizes() != weight.sizes()) {
    throw Error(Code::kTensorMismatch,
                fmt::format("the optimizer's {} has shape {} and its parameter {}", what,
                            shape_text(state.sizes()), shape_text(weight.sizes())),
                "load a state that was saved for the same model, with the parameters in the same "
                "order");
  }
  if (state.dtype() == weight.dtype() && state.device() == weight.device() &&
      state.strides() == weight.strides()) {
    return state;
  }
  require_not_capturing("moving an optimizer's state",
                        "let a step run before it is captured (CaptureOptions::warmup)");
  torch::Tensor fitted = empty_like_weight(weight);
  fitted.copy_(state);
  return fitted;
}

}  // namespace lockstep
