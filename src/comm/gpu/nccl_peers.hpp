#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/backend.hpp"
#include "comm/shm/shm_peers.hpp"

namespace lockstep {

/// The processes of the other ranks, as far as they are on this host: NCCL tells that a peer was
/// lost or that a call does not end, but not whose fault it is.
class NcclPeers {
 public:
  /// Collective over `host`.
  NcclPeers(Backend& host, int64_t deadline_ns);

  /// Does a part of `call`. An error that blames nobody becomes that of a peer that has ended or is
  /// stopped, where there is one.
  void blaming(const Call& call, const std::function<void()>& part) const;

 private:
  struct Peer {
    int place;
    PeerProcess process;
  };

  void throw_ended(const Call& call) const;
  void throw_stopped(const Call& call) const;

  const Group group_;
  std::vector<Peer> peers_;
};

}  // namespace lockstep
