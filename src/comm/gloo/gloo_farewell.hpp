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
    kMismatch,  ///< calls[i] is what the rank at places[i] called
    kStuck,     ///< a call was not done in time: whoever lives answers with what it does itself
  };

  Kind kind = Kind::kLeft;
  int64_t waited_ns = 0;        ///< kStuck: of the rank whose call it was; 0: an answer
  std::vector<int32_t> places;  ///< kStuck: for whom that call waits; none: as `calls` tells
  std::vector<Call> calls;      ///< kStuck: in which this rank waits
  std::vector<int32_t> peers;   ///< kStuck: [call], as in RankActivity
  int64_t arrived = 0;          ///< kStuck: as in RankActivity
  int64_t finished = 0;
  std::string reason;

  /// A kStuck one: what this rank does.
  static Farewell of(const RankActivity& activity);
  RankActivity activity() const;

  std::string encode() const;
  static std::optional<Farewell> decode(std::string_view bytes);
};

/// The farewell with which a rank passes on what it heard from the rank at `from`.
Farewell pass_on(const Farewell& heard, int from);

/// The error of a call that cannot be made after the rank at `from` said this; not for kStuck.
[[noreturn]] void throw_farewell(const Group& group, const Call& call, int from,
                                 const Farewell& farewell);

}  // namespace lockstep
