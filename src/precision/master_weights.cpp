#include "lockstep/master_weights.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>

#include "base/mutation.hpp"
#include "device/capture.hpp"
#include "device/parameter_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

bool owns_a_matrix(const torch::nn::Module& module) {
  const auto own = module.parameters(/*recurse=*/false);
  return std::any_of(own.begin(), own.end(), [](const auto& each) { return each.dim() >= 2; });
}

// Visits every parameter with its owner and its name in named_parameters(); a shared one once for
// each owner.
template <class Visit>
void for_each_parameter(const torch::nn::Module& module, const std::string& prefix,
                        const Visit& visit) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    visit(module, prefix + item.key(), item.value());
  }
  for (const auto& child : module.named_children()) {
    for_each_parameter(*child.value(), prefix + child.key() + ".", visit);
  }
}

void check_choice(const std::string& name, const torch::Tensor& parameter) {
  if (parameter.scalar_type() != torch::kFloat32) {
    throw Error(Code::kTensorMismatch,
                fmt::format("MasterWeights: {} is {}, and only float32 weights can become low "
                            "precision",
                            name, dtype_text(parameter.scalar_type())),
                "make MasterWeights once, from a float32 model, or leave this parameter out with "
                "MasterWeightsOptions::which");
  }
  if (parameter.layout() != torch::kStrided || !parameter.is_non_overlapping_and_dense()) {
    throw Error(Code::kTensorMismatch, fmt::format("MasterWeights: {} is not dense", name),
                "make the parameter from a contiguous() copy");
  }
}

// Exchanges the parameter's memory and drops its gradient, whose dtype no longer fits.
void put_data(torch::Tensor parameter, const torch::Tensor& data) {
  parameter.mutable_grad().reset();
  parameter.set_data(data);
}

}  // namespace

struct MasterWeights::State {
  struct Held {
    torch::Tensor parameter;
    torch::Tensor master;
    // The version and address of the parameter when it was last rounded from the master.
    uint32_t version = 0;
    const void* memory = nullptr;
    bool is_shard = false;  // of a divided parameter

    bool is_as_rounded() const {
      return version == version_of(parameter) && memory == parameter.data_ptr();
    }
    void note_rounded() {
      version = version_of(parameter);
      memory = parameter.data_ptr();
    }
    // Elements that still equal the rounded master keep the master's precision.
    void take_changes() {
      if (is_planted(Mutation::kMastersKeepStart)) return note_rounded();
      const torch::NoGradGuard no_grad;
      const auto changed = parameter.ne(master.to(parameter.scalar_type()));
      master.copy_(torch::where(changed, parameter.to(master.scalar_type()), master));
      note_rounded();
    }
  };

  static uint32_t version_of(const torch::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }

  Held* find(const torch::Tensor& parameter) {
    const auto found = held.find(parameter.unsafeGetTensorImpl());
    return found == held.end() ? nullptr : &found->second;
  }

  void hold(const torch::Tensor& parameter, torch::ScalarType dtype) {
    const torch::Tensor master = parameter.data();  // the memory that was the parameter's
    put_data(parameter, master.to(dtype));
    held.emplace(parameter.unsafeGetTensorImpl(), Held{parameter, master})
        .first->second.note_rounded();
  }

  // The owners of all held parameters in this process.
  static ParameterMap<std::weak_ptr<State>>& holders() {
    static ParameterMap<std::weak_ptr<State>> map;
    return map;
  }

  std::unordered_map<const c10::TensorImpl*, Held> held;  // [parameter]
};

MasterWeights::MasterWeights(torch::nn::Module& module, const MasterWeightsOptions& options)
    : state_(std::make_shared<State>()) {
  if (options.dtype != torch::kHalf && options.dtype != torch::kBFloat16) {
    throw Error(Code::kUsage,
                fmt::format("MasterWeights rounds to {}, which is not a lower precision",
                            dtype_text(options.dtype)),
                "use torch::kBFloat16 or torch::kHalf");
  }
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> chosen;  // all are checked before any changes
  for_each_parameter(
      module, "", [&](const auto& owner, const std::string& name, const torch::Tensor& parameter) {
        const bool low = options.which
                             ? options.which(name, parameter)
                             : parameter.scalar_type() == torch::kFloat32 && owns_a_matrix(owner);
        if (!low) return;
        check_choice(name, parameter);
        chosen.push_back(parameter);
      });
  for (const torch::Tensor& parameter : chosen) {
    if (holds(parameter)) continue;  // a shared one is listed twice
    state_->hold(parameter, options.dtype);
    State::holders().set(parameter, state_);
  }
}

std::optional<MasterWeights> MasterWeights::holding(const torch::Tensor& parameter) {
  const auto found = State::holders().get(parameter);
  if (!found) return std::nullopt;
  const auto state = found->lock();
  if (state == nullptr || state->find(parameter) == nullptr) return std::nullopt;
  return MasterWeights(state);
}

torch::Tensor MasterWeights::of(const torch::Tensor& parameter) const {
  State::Held* held = state_->find(parameter);
  if (held == nullptr) return parameter;
  if (held->master.device() != parameter.device()) {  // the module has moved
    require_not_capturing("moving master weights", "let a step run before it is captured");
    held->master = held->master.to(parameter.device());
  }
  // The optimizer will refuse a parameter of another dtype or shape by name.
  const bool comparable =
      parameter.scalar_type() != torch::kFloat32 && parameter.sizes() == held->master.sizes();
  if (comparable && !held->is_as_rounded()) held->take_changes();
  return held->master;
}

void MasterWeights::round(const torch::Tensor& parameter) const {
  State::Held* held = state_->find(parameter);
  if (held == nullptr) return;
  const torch::NoGradGuard no_grad;
  held->parameter.copy_(held->master);
  held->note_rounded();
}

void MasterWeights::note_rounded(const torch::Tensor& parameter) const {
  if (State::Held* held = state_->find(parameter)) held->note_rounded();
}

bool MasterWeights::holds(const torch::Tensor& parameter) const {
  return state_->find(parameter) != nullptr;
}

int64_t MasterWeights::bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, held] : state_->held) {
    bytes += held.master.numel() * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

void MasterWeights::replace(const torch::Tensor& parameter, const torch::Tensor& shard,
                            const torch::Tensor& master) const {
  state_->held.erase(parameter.unsafeGetTensorImpl());
  State::holders().erase(parameter);
  State::Held& held =
      state_->held.emplace(shard.unsafeGetTensorImpl(), State::Held{shard, master}).first->second;
  held.is_shard = true;
  held.note_rounded();
  State::holders().set(shard, state_);
}

void MasterWeights::restore(torch::nn::Module& module) const {
  require_not_capturing("MasterWeights::restore()", "restore after the step");
  const bool divided = std::any_of(state_->held.begin(), state_->held.end(),
                                   [](const auto& each) { return each.second.is_shard; });
  if (divided) {
    throw Error(Code::kUsage,
                "MasterWeights::restore() of weights that FullyShardedDataParallel divides",
                "restore them before the module is wrapped, or store them with "
                "Checkpoint::add(name, masters, fsdp)");
  }
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& parameter : module.parameters()) {
    if (!holds(parameter)) continue;
    put_data(parameter, of(parameter));
    state_->held.erase(parameter.unsafeGetTensorImpl());
    State::holders().erase(parameter);
  }
}

void MasterWeights::take_from_parameters() {
  const torch::NoGradGuard no_grad;
  for (auto& [key, held] : state_->held) {
    of(held.parameter).copy_(held.parameter);
    held.note_rounded();
  }
}

}  // namespace lockstep
