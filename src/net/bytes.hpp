#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

/// Little-endian, `width` bytes.
inline void put_integer(std::string& text, uint64_t value, size_t width) {
  for (size_t i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i));
}

inline uint64_t get_integer(std::string_view text, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
  return value;
}

}  // namespace lockstep
