#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "net/store_limits.hpp"

// What a store's client and server say to each other, one payload each way.

namespace lockstep {

enum class StoreVerb : uint8_t { kSet = 1, kGet = 2 };

enum class StoreAnswer : uint8_t { kDone = 1, kSetAlready = 2, kFull = 3 };

/// [verb 1][length of key 2][key][value].
struct StoreRequest {
  StoreVerb verb = StoreVerb::kGet;
  std::string_view key;
  std::string_view value = {};  ///< of a set
};

inline constexpr size_t kMaxStorePayload = 1 + 2 + kMaxKeyBytes + kMaxValueBytes;

std::string encode(const StoreRequest& request);

/// Views into `payload`; anything that encode() cannot have made is an Error.
StoreRequest decode_request(std::string_view payload);

}  // namespace lockstep
