#include "device/dtype_map.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"

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

std::string dtype_text(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kFloat16:
      return "float16";
    case torch::kBFloat16:
      return "bfloat16";
    case torch::kFloat32:
      return "float32";
    case torch::kFloat64:
      return "float64";
    case torch::kInt64:
      return "int64";
    case torch::kInt32:
      return "int32";
    default: {
      std::string text = c10::toString(dtype);
      std::transform(text.begin(), text.end(), text.begin(),
                     [](unsigned char c) { return std::tolower(c); });
      return text;
    }
  }
}

std::string shape_text(torch::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

}  // namespace lockstep
