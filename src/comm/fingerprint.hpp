#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "lockstep/reduce_op.hpp"

namespace lockstep {

enum class Operation : uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kReduceScatter,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
  kSplit,
  kAllocate,
  kAllocateShared,
};

/// "all_reduce".
std::string_view operation_name(Operation operation);

/// What one rank says about a call. Ranks compare fingerprints before any data moves. It is plain
/// bytes: it lies in shared memory and travels over sockets.
struct Fingerprint {
  int64_t sequence = 0;  ///< counts a communicator's collectives from 1, or a pair's messages
  int64_t count = 0;     ///< elements; of one block, if there are several; kOwnCounts
  double weight = 1;     ///< of this rank in a mean; the only field in which ranks may differ
  Operation operation = Operation::kBarrier;
  Dtype dtype = Dtype::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  int32_t root = -1;    ///< of a broadcast, reduce, gather or scatter; the tag of a message
  char label[32] = {};  ///< what the call is for, such as "bucket 3"; ends in '\0'

  /// The count of a call in which ranks give and take different counts.
  static constexpr int64_t kOwnCounts = -1;

  void set_label(std::string_view text);  ///< cut to 31 bytes
};

/// Whether bytes that came from another process are a fingerprint: operation, dtype and reduction
/// exist, and the label ends.
bool is_valid(const Fingerprint& call);

/// Whether two ranks make the same call. A send agrees with the recv that waits for it, whatever
/// their labels.
bool agree(const Fingerprint& a, const Fingerprint& b);

/// "all_reduce #17 (bucket 3): 1024 x F32, sum".
std::string describe(const Fingerprint& call);

/// The ranks of a communicator.
struct Group {
  int rank = 0;                  ///< this rank's number in the group
  std::vector<int> world_ranks;  ///< [group rank] -> rank of the world, for messages
  std::string name = "world";    ///< "dp 1"

  int size() const { return static_cast<int>(world_ranks.size()); }
  int world_rank(int group_rank) const { return world_ranks.at(static_cast<size_t>(group_rank)); }

  /// The group rank of a rank of the world; -1 if it is not a member.
  int group_rank(int world_rank) const;

  /// All ranks of a world.
  static Group world(int rank, int size);
};

/// "all_reduce #17 (bucket 3): 1024 x F32, sum", with the group if that is not the world.
std::string describe_in(const Group& group, const Fingerprint& call);

/// [group rank] -> what that rank's values are multiplied by in a mean: its weight over the sum of
/// all weights. Empty for other operations. kUsage if all weights are zero.
std::vector<double> mean_factors(std::span<const Fingerprint> calls);

/// The same for a mean, from the ranks' weights.
std::vector<double> mean_factors(const Fingerprint& call, std::vector<double> weights);

}  // namespace lockstep
