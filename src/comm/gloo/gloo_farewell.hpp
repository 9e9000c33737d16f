#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/call.hpp"

namespace lockstep {

/// The last thing a rank says to its peers: why it will not take part any more. A rank that fails
/// passes on the cause it knows, so that all ranks blame the same one.
struct Farewell {
  enum class Kind : uint8_t {
    kLeft,      ///< the communicator was destroyed with nothing wrong
    kAborted,   ///< this rank gave up: `reason`
    kFailed,    ///< the rank at places[0] failed: `reason`
    kAbsent,    ///< the ranks at `places` did not come to calls[0] for waited_ns
    kMismatch,  ///< calls[i] is what the rank at places[i] called
    kStuck,     ///< a transfer did not end in time: whoever lives answers with the same
  };

  Kind kind = Kind::kLeft;
  int64_t waited_ns = 0;
  std::vector<int32_t> places;
  std::vector<Call> calls;
  std::string reason;

  std::string encode() const;
  static std::optional<Farewell> decode(std::string_view bytes);
};

/// The farewell with which a rank passes on what it heard from the rank at `from`.
Farewell pass_on(const Farewell& heard, int from);

/// The error of a call that cannot be made after the rank at `from` said this; not for kStuck.
[[noreturn]] void throw_farewell(const Group& group, const Call& call, int from,
                                 const Farewell& farewell);

}  // namespace lockstep
