#include "launch/rendezvous.hpp"

#include <numeric>

#include "launch/rendezvous_node.hpp"

namespace lockstep {

int JobLayout::world_size() const {
  return std::accumulate(local_world_sizes.begin(), local_world_sizes.end(), 0);
}

int JobLayout::first_rank() const {
  return std::accumulate(local_world_sizes.begin(), local_world_sizes.begin() + node_rank, 0);
}

std::unique_ptr<NodeLink> NodeLink::join(const RendezvousOptions& options, const NodeOffer& offer) {
  return NetworkNodeLink::join(options, offer);
}

}  // namespace lockstep
