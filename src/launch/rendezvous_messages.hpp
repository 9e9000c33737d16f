#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "launch/rendezvous.hpp"

// The messages between launchers: JSON in authenticated frames.

namespace lockstep {

inline constexpr size_t kMaxNodeMessage = 1 << 20;  // bytes

/// A launcher wants to join.
struct JoinMessage {
  std::string version;  ///< of lockstep
  std::string job_id;
  HostCount nnodes;
  int max_restarts = 0;
  int64_t heartbeat_ns = 0;
  int64_t lost_after_ns = 0;
  NodeOffer offer;
};

/// A launcher whose ranks are gone wants to join the next attempt.
struct RejoinMessage {
  int master_port = 0;
};

/// A heartbeat; both ways.
struct BeatMessage {};

/// A failure: from its host to node 0, and from there to all.
struct FailedMessage {
  RemoteFailure failure;
};

/// A rank ended well without ever coming to a rendezvous; from its host to node 0, and from there
/// to the hosts whose ranks may wait for it.
struct LeftMessage {
  int rank = 0;  ///< in the world
};

/// To node 0: this host's ranks ended well. From node 0: those of all hosts did.
struct FinishedMessage {};

/// From node 0: the launcher cannot join.
struct RefusedMessage {
  std::string why;
  std::string help;
};

/// From node 0, to hosts that wait for an attempt.
struct StatusMessage {
  int running = 0;  ///< hosts of the running attempt; 0 between attempts
  std::vector<std::pair<int, std::string>> present;  ///< waiting: node rank (-1: none yet) and host
  std::vector<std::string> lost;                     ///< since the last attempt began: who, and why
  std::vector<std::string> turned_away;              ///< who, and why
};

/// From node 0: an attempt begins. The receiver derives layout.store from its master_addr.
struct LayoutMessage {
  JobLayout layout;  ///< master_addr is set for node 0 only
  int store_port = 0;
};

using NodeMessage =
    std::variant<JoinMessage, RejoinMessage, BeatMessage, FailedMessage, LeftMessage,
                 FinishedMessage, RefusedMessage, StatusMessage, LayoutMessage>;

std::string encode(const NodeMessage& message);

/// The failure of a job that has lost the host of its coordinator.
RemoteFailure loss_of_node_0(const std::string& host, const std::string& why);

/// Anything that encode() cannot produce is an Error (kRendezvous).
NodeMessage decode_node_message(std::string_view payload);

}  // namespace lockstep
