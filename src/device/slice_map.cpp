#include "device/slice_map.hpp"

#include "device/parameter_map.hpp"

namespace lockstep {
namespace {

ParameterMap<Slice>& noted_slices() {
  static ParameterMap<Slice> map;
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

}  // namespace lockstep
