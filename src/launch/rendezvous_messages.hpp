#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "launch/rendezvous.hpp"

// What launchers say to each other, as JSON in authenticated frames.

namespace lockstep {

inline constexpr size_t kMaxNodeMessage = 1 << 20;  // bytes
inline constexpr int kMaxNodes = 2048;

/// A launcher wants to take part.
struct JoinMessage {
  std::string version;  ///< of lockstep
  std::string job_id;
  int nnodes = 1;
  int max_restarts = 0;
  NodeOffer offer;
};

/// A launcher whose ranks are gone wants the next round.
struct RejoinMessage {
  int master_port = 0;
};

/// Still here; both ways.
struct BeatMessage {};

/// A failure: to node 0 from where it happened, from there to all.
struct FailedMessage {
  RemoteFailure failure;
};

/// To node 0: this host's ranks ended well. From node 0: those of all hosts did.
struct FinishedMessage {};

/// From node 0: you cannot take part.
struct RefusedMessage {
  std::string why;
  std::string help;
};

/// From node 0, while hosts are awaited: who is here.
struct StatusMessage {
  std::vector<std::pair<int, std::string>> present;  ///< node rank (-1: not yet given) and host
  std::vector<std::string> turned_away;              ///< who came and could not stay, and why
};

/// From node 0: all are here. Without `store`, which the receiver makes of its master_addr.
struct LayoutMessage {
  JobLayout layout;  ///< master_addr is empty but for node 0 itself
  int store_port = 0;
};

using NodeMessage = std::variant<JoinMessage, RejoinMessage, BeatMessage, FailedMessage,
                                 FinishedMessage, RefusedMessage, StatusMessage, LayoutMessage>;

std::string encode(const NodeMessage& message);

/// Anything that encode() cannot have made is an Error (kRendezvous).
NodeMessage decode_node_message(std::string_view payload);

}  // namespace lockstep
