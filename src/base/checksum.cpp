#include "base/checksum.hpp"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <new>

namespace lockstep {
namespace {

Digest canonical(const XXH128_hash_t& hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  return std::bit_cast<Digest>(bytes);
}

}  // namespace

std::string digest_text(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

struct Checksum::State {
  XXH3_state_t* xxh3 = XXH3_createState();  // aligned to 64 bytes

  State() {
    if (xxh3 == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(xxh3);
  }
  ~State() { XXH3_freeState(xxh3); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;

void Checksum::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_128bits_update(state_->xxh3, bytes.data(), bytes.size());
}

void Checksum::add(std::string_view text) {
  add(std::as_bytes(std::span(text)));
}

Digest Checksum::digest() const {
  return canonical(XXH3_128bits_digest(state_->xxh3));
}

Digest checksum_of(std::span<const std::byte> bytes) {
  return canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

Digest checksum_of(std::string_view text) {
  return checksum_of(std::as_bytes(std::span(text)));
}

uint64_t hash_of(std::string_view text) {
  return XXH3_64bits(text.data(), text.size());
}

}  // namespace lockstep
