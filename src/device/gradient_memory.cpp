#include "device/gradient_memory.hpp"

#include "device/parameter_map.hpp"

namespace lockstep {
namespace {

ParameterMap<std::weak_ptr<const ClaimGradientMemory>>& noted_memory() {
  static ParameterMap<std::weak_ptr<const ClaimGradientMemory>> map;
  return map;
}

}  // namespace

void note_gradient_memory(const torch::Tensor& parameter,
                          const std::shared_ptr<const ClaimGradientMemory>& claim) {
  noted_memory().set(parameter, claim);
}

std::weak_ptr<const ClaimGradientMemory> gradient_memory_of(const torch::Tensor& parameter) {
  return noted_memory().get(parameter).value_or(std::weak_ptr<const ClaimGradientMemory>());
}

}  // namespace lockstep
