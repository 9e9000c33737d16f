#pragma once

#include <torch/types.h>

#include <optional>

#include "lockstep/dtype.hpp"

namespace lockstep {

/// Nothing where libtorch has a type that lockstep does not move, such as complex numbers.
std::optional<Dtype> dtype_of(torch::ScalarType scalar_type);

torch::ScalarType scalar_type_of(Dtype dtype);

}  // namespace lockstep
