#include "device/parameter_notes.hpp"

#include <fmt/format.h>

#include "device/parameter_map.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

ParameterMap<Slice>& noted_slices() {
  static ParameterMap<Slice> map;
  return map;
}

ParameterMap<bool>& sharded_parameters() {
  static ParameterMap<bool> map;
  return map;
}

ParameterMap<std::weak_ptr<const ClaimGradientMemory>>& noted_memory() {
  static ParameterMap<std::weak_ptr<const ClaimGradientMemory>> map;
  return map;
}

}  // namespace

void note_slice(const torch::Tensor& parameter, Slice slice) {
  noted_slices().set(parameter, std::move(slice));
}

Slice slice_of(const torch::Tensor& parameter) {
  if (!noted_slices().empty()) {
    if (auto slice = noted_slices().get(parameter)) return *std::move(slice);
  }
  return whole_slice(parameter.sizes().vec());
}

void note_sharded(const torch::Tensor& parameter, bool sharded) {
  if (sharded) {
    sharded_parameters().set(parameter, true);
  } else {
    sharded_parameters().erase(parameter);
  }
}

bool is_sharded(const torch::Tensor& parameter) {
  return !sharded_parameters().empty() && sharded_parameters().get(parameter).has_value();
}

void require_not_sharded(const torch::nn::Module& module, const char* what, const char* remedy) {
  if (sharded_parameters().empty()) return;
  for (const auto& item : module.named_parameters()) {
    if (!is_sharded(item.value())) continue;
    throw Error(Code::kUsage,
                fmt::format("{} was given a module whose parameter {} is sharded by "
                            "FullyShardedDataParallel",
                            what, item.key()),
                remedy);
  }
}

void note_gradient_memory(const torch::Tensor& parameter,
                          const std::shared_ptr<const ClaimGradientMemory>& claim) {
  noted_memory().set(parameter, claim);
}

std::weak_ptr<const ClaimGradientMemory> gradient_memory_of(const torch::Tensor& parameter) {
  return noted_memory().get(parameter).value_or(std::weak_ptr<const ClaimGradientMemory>());
}

}  // namespace lockstep
