#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// The type of a tensor's elements. dtype_name() gives its name in safetensors.
enum class Dtype : uint8_t { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };

/// Bytes per element.
int64_t dtype_bytes(Dtype dtype);

/// "F32".
std::string_view dtype_name(Dtype dtype);

}  // namespace lockstep
