#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/backend.hpp"
#include "comm/network/network_core.hpp"
#include "comm/two_level/host_map.hpp"

namespace lockstep {

inline std::byte* byte_at(void* data, int64_t bytes) {
  return static_cast<std::byte*>(data) + bytes;
}
inline const std::byte* byte_at(const void* data, int64_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

/// Note [Two levels].
///
///   host         ranks that can share memory
///   link         what is between the hosts: the slow part, shared by all ranks of a host
///   inside       between ranks of one host, through shared memory
///   region       a run of elements in the order of the buffer
///   slice        the part of a region that one rank of a host owns. Each host divides a region
///                among its own ranks, so that the slices of unequal hosts overlap
///   chunk        a region that moves as one: while it is on the link, others move inside
///   home         the host that reduces a chunk
///
/// An all_reduce takes its buffer chunk by chunk, each in these steps:
///
///   1. inside:   reduce_scatter; each rank has the sum of its host for its slice
///   2. link:     each rank sends its slice to the ranks of the home that own the same elements
///   3. home:     they add the hosts' sums in the order of the hosts
///   4. link:     they send the sums back
///   5. inside:   all_gather
///
/// Chunks take turns in being at home on each of the H hosts, so that a host sends and receives
/// 2 (H-1)/H of the buffer: the least there is. Between two hosts, or for few bytes, every host is
/// home to every chunk: they send once, which between two hosts are the same bytes, and save the
/// way back. Few bytes are reduced by one rank of each host, its leader, which owns all.
///
/// The other collectives are parts of this. reduce_scatter: steps 1 to 3, a host's blocks being at
/// home there. all_gather: steps 4 and 5. reduce: leaders, with the root as the home's. broadcast:
/// from leader to leader along the hosts, each spreading a chunk inside while the next one comes.
/// Blocks that differ for each pair of ranks go straight to where they belong.
///
/// All sums are added in the same order in every run, and each is computed once or by the same
/// steps: all ranks get the same bits.
///
/// What is reduced, and how.
struct TwoLevelReduction {
  ReduceOp op = ReduceOp::kSum;
  double weight = 1;                 ///< of this rank inside its host, in a mean
  std::vector<double> factors = {};  ///< [host], of a mean

  static TwoLevelReduction of(ReduceOp op, std::span<const Fingerprint> calls,
                              const HostMap& hosts);
};

/// Which ranks own the slices of a region on each host: all of them, or one.
struct SliceOwners {
  bool leaders = false;  ///< one owner on each host
  int root = -1;         ///< of leaders: this rank is one, instead of the first one of its host

  int count(const HostMap& hosts, int host) const { return leaders ? 1 : hosts.size_of(host); }
  /// The group rank of an owner.
  int rank(const HostMap& hosts, int host, int owner) const;
  /// The local rank of a host's only owner.
  int leader(const HostMap& hosts, int host) const;
  /// The slice of this rank; nothing if it owns none.
  ElementRange own(const HostMap& hosts, int64_t count) const;
};

/// How the data of collectives moves between ranks of several hosts. `inside` are the ranks of this
/// host, by local rank; null: there is one. Functions are called one at a time, in a task's body.
class TwoLevelMoves {
 public:
  using Task = NetworkCore::Task;
  using Calls = std::span<const Fingerprint>;

  TwoLevelMoves(NetworkCore& core, const HostMap& hosts, Backend* inside)
      : core_(core), hosts_(hosts), inside_(inside) {}

  /// Before the ranks have compared their calls. Returns what is to be done after that.
  NetworkCore::Body all_reduce(const Task& task, const Buffer& buffer, ReduceOp op);
  void reduce(const Task& task, const Buffer& buffer, int root, ReduceOp op, Calls calls);
  void broadcast(const Task& task, const Buffer& buffer, int root);

  // Where the ranks of each host follow each other.

  void reduce_scatter(const Task& task, const ConstBuffer& input, const Buffer& output, ReduceOp op,
                      Calls calls);
  /// counts[group rank]: elements of its block.
  void all_gather(const Task& task, const ConstBuffer& input, const Buffer& output,
                  const std::vector<int64_t>& counts);
  void exchange(const Task& task, const ConstBuffer& input, const Buffer& output,
                const BlockExchange& blocks);

  /// Reduces the values of all ranks, which are here already, to the bits that reduce() gives.
  void add(std::span<const void* const> inputs, const Buffer& output, ReduceOp op,
           Calls calls) const;

  /// Makes calls among the ranks of this host. Where they fail, the cause may be on another host:
  /// it is found out there.
  void call_inside(const Task& task, const std::function<void(const CallContext&)>& calls);

 private:
  class AllReduce;
  using OnLink = std::unique_ptr<TransportData::Exchange>;

  // Blocks between this rank and those of other hosts, in elements of two buffers.
  class LinkBlocks {
   public:
    LinkBlocks(int ranks, int64_t element_bytes);
    void give(int rank, int64_t offset, int64_t count);
    void take(int rank, int64_t offset, int64_t count);
    NetworkCore::Blocks blocks;
    bool empty = true;

   private:
    LockstepTransportBlock block(int64_t offset, int64_t count) const;
    int64_t element_bytes_;
  };
  LinkBlocks link_blocks(Dtype dtype) const;
  OnLink begin(const Task& task, uint32_t part, const LinkBlocks& blocks);
  void end(const Task& task, OnLink& blocks);

  void reduce_inside(const Task& task, const ConstBuffer& region, void* slice,
                     const TwoLevelReduction& how, const SliceOwners& owners);
  void spread_inside(const Task& task, const Buffer& region, const SliceOwners& owners);
  void gather_inside(const Task& task, const ConstBuffer& input, const Buffer& region,
                     const std::vector<int64_t>& counts);
  void add_hosts(const Buffer& slice, const void* own, const std::byte* others,
                 const TwoLevelReduction& how) const;

  bool alone() const { return hosts_.local_size() == 1; }
  bool is_own(int host) const { return host == hosts_.host(); }
  /// The number of another host among the others.
  int64_t other(int host) const { return host < hosts_.host() ? host : host - 1; }
  std::byte* scratch(size_t slot, int64_t bytes);

  NetworkCore& core_;
  const HostMap& hosts_;
  Backend* inside_;
  std::vector<std::vector<std::byte>> scratch_;  // kept between calls
};

}  // namespace lockstep
