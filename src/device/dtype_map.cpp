#include "device/dtype_map.hpp"

#include <fmt/format.h>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr std::pair<torch::ScalarType, Dtype> kDtypes[] = {
    {torch::kBool, Dtype::kBool},   {torch::kUInt8, Dtype::kU8},
    {torch::kInt8, Dtype::kI8},     {torch::kInt16, Dtype::kI16},
    {torch::kInt32, Dtype::kI32},   {torch::kInt64, Dtype::kI64},
    {torch::kFloat16, Dtype::kF16}, {torch::kBFloat16, Dtype::kBF16},
    {torch::kFloat32, Dtype::kF32}, {torch::kFloat64, Dtype::kF64},
};

}  // namespace

std::optional<Dtype> dtype_of(torch::ScalarType scalar_type) {
  for (const auto& [known, dtype] : kDtypes) {
    if (known == scalar_type) return dtype;
  }
  return std::nullopt;
}

torch::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& [scalar_type, known] : kDtypes) {
    if (known == dtype) return scalar_type;
  }
  throw Error(Code::kInternal, fmt::format("dtype {} has no libtorch type", dtype_name(dtype)));
}

}  // namespace lockstep
