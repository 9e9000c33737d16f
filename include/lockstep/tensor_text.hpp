#pragma once

#include <torch/types.h>

#include <string>

namespace lockstep {

/// "float32".
std::string dtype_text(torch::ScalarType dtype);

/// "[64, 1024]".
std::string shape_text(torch::IntArrayRef shape);

}  // namespace lockstep
