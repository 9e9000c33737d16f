#pragma once

#include <cstddef>
#include <string_view>

#include "lockstep/error.hpp"
#include "net/store.hpp"

// What all stores allow, and the errors they have in common.

namespace lockstep {

inline constexpr size_t kMaxKeyBytes = 1 << 10;
inline constexpr size_t kMaxValueBytes = 1 << 20;

/// A key of 1 to kMaxKeyBytes and a value of at most kMaxValueBytes, or an Error.
void check_sizes(std::string_view key, std::string_view value);

[[noreturn]] void throw_set_twice(std::string_view key);
[[noreturn]] void throw_never_set(std::string_view key);

}  // namespace lockstep
