#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

// The few cryptographic acts the network code needs; all but the random bytes are OpenSSL's.

namespace lockstep {

inline constexpr size_t kMacBytes = 32;

/// From the kernel's generator.
std::string random_bytes(size_t count);

/// HMAC-SHA256 over the pieces one after the other. Pieces whose lengths vary must be preceded by
/// their lengths, or two texts could give one code.
std::string hmac_sha256(std::string_view key, std::initializer_list<std::string_view> pieces);

/// Takes the same time whatever differs.
bool equal_secrets(std::string_view a, std::string_view b);

/// Lower-case digits, two for each byte.
std::string to_hex(std::string_view bytes);

}  // namespace lockstep
