#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

/// Bytes from the kernel's generator.
std::string random_bytes(size_t count);

/// Lower-case hexadecimal, two digits per byte.
std::string to_hex(std::string_view bytes);

/// Such digits of random bytes: a name that nobody else has, or a secret.
std::string random_hex(size_t digits);

}  // namespace lockstep
