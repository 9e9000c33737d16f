#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

struct RankEnvironment;

/// Which ranks of a group are on which host. Hosts are numbered in the order of their first ranks.
class HostMap {
 public:
  /// identities[group rank]: the same text for ranks of one host.
  HostMap(std::span<const std::string> identities, int rank);

  int hosts() const { return static_cast<int>(members_.size()); }
  int host() const { return host_; }              ///< of this rank
  int local_rank() const { return local_rank_; }  ///< of this rank among those of its host
  int local_size() const { return size_of(host_); }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }

  /// The group ranks on a host, ascending.
  const std::vector<int>& members(int host) const { return members_[static_cast<size_t>(host)]; }
  int size_of(int host) const { return static_cast<int>(members(host).size()); }
  int local_rank_of(int rank) const;
  int largest() const;  ///< ranks of the host that has most

  /// Whether the ranks of each host follow each other.
  bool in_order() const { return in_order_; }

 private:
  std::vector<int> host_of_;               // [group rank]
  std::vector<std::vector<int>> members_;  // [host]
  int host_ = 0;
  int local_rank_ = 0;
  bool in_order_ = true;
};

/// A text that is the same on all ranks that can share memory, and differs between hosts,
/// containers, users, and the nodes that a launcher tells apart on one machine.
std::string host_identity(const RankEnvironment& environment);

/// Elements begin to end of a region.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t count() const { return end - begin; }
};

/// The slice of a region of `count` elements that belongs to one of its owners: equal ones, and
/// the last owner has what is left over, too.
ElementRange slice_of(int64_t count, int owners, int owner);

/// Empty if two ranges have nothing in common.
ElementRange overlap(ElementRange a, ElementRange b);

}  // namespace lockstep
