#pragma once

#include <torch/types.h>

#include <optional>

#include "base/dtype.hpp"

namespace lockstep {

/// Nothing for a type that lockstep does not support, such as complex numbers.
std::optional<Dtype> dtype_of(torch::ScalarType scalar_type);

torch::ScalarType scalar_type_of(Dtype dtype);

}  // namespace lockstep
