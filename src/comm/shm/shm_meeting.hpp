#pragma once

#include <memory>
#include <vector>

#include "comm/backends.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/shm/shm_peers.hpp"

namespace lockstep {

/// What a rank needs to talk to the others of its group. Rank 0 is the leader: it makes memory and
/// hands it to the members, over one connection each.
struct ShmMembership {
  Group group;
  std::shared_ptr<MappingPool> pool;
  std::shared_ptr<Mapping> control;
  std::vector<OwnedDescriptor> members;  // [place]; the leader's, null for itself
  OwnedDescriptor leader;                // a member's
  std::vector<PeerProcess> processes;    // [place]
};

/// Processes meet at a socket named after the session. kRendezvous says who came and who did not,
/// or why this rank was refused.
ShmMembership meet_processes(const ShmOptions& options);

/// Threads of this process: [rank].
std::vector<ShmMembership> meet_threads(int size);

}  // namespace lockstep
