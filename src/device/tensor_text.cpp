#include "lockstep/tensor_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

namespace lockstep {

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
