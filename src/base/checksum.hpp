#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// Sixteen bytes of XXH3, most significant first: what `xxh128sum` prints.
using Digest = std::array<std::byte, 16>;

/// Lower-case hexadecimal, 32 digits.
std::string digest_text(const Digest& digest);

/// The checksum of bytes that come in pieces. It detects damage, not forgery.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void add(std::span<const std::byte> bytes);
  void add(std::string_view text);
  Digest digest() const;  ///< of all bytes so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

Digest checksum_of(std::span<const std::byte> bytes);
Digest checksum_of(std::string_view text);

/// 64 bits of a text, for comparing names between ranks.
uint64_t hash_of(std::string_view text);

}  // namespace lockstep
