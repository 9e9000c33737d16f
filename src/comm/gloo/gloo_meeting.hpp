#pragma once

#include <string>
#include <vector>

#include "comm/call.hpp"
#include "net/socket.hpp"
#include "net/store.hpp"

namespace lockstep {

/// A connection between every two ranks of a group.
struct GlooMeeting {
  std::vector<Socket> sockets;  ///< [place]; this rank's own is empty
  std::string address;          ///< this rank's, in digits
};

/// Connects all ranks, each listening at its `address` (in digits, or "localhost") for those above
/// it. Only who can read the store is let in. kRendezvous at the deadline names who did not come.
GlooMeeting meet(Store& store, const Group& group, const std::string& address, int64_t deadline_ns);

}  // namespace lockstep
