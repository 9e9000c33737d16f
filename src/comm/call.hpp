#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/dtype.hpp"
#include "lockstep/reduce_op.hpp"

namespace lockstep {

enum class Operation : uint8_t {
  kAllReduce,
  kBroadcast,
  kReduceScatter,
  kAllGather,
  kSend,
  kRecv,
  kBarrier,
  kSplit,
  kAllocate,
};

/// "all_reduce".
std::string_view operation_name(Operation operation);

/// What one rank says about a call. Ranks compare these before any data moves. Plain bytes: it lies
/// in shared memory and travels over sockets.
struct Call {
  int64_t sequence = 0;  ///< counts a communicator's collectives from 1, or a pair's messages
  int64_t count = 0;     ///< elements; of the smaller side of a gather or scatter
  double weight = 1;     ///< of this rank in a mean; the only field in which ranks may differ
  Operation operation = Operation::kBarrier;
  Dtype dtype = Dtype::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  int32_t root = -1;    ///< of a broadcast; the tag of a message
  char label[32] = {};  ///< what the call is for, such as "bucket 3"; ends in '\0'

  void set_label(std::string_view text);  ///< cut to 31 bytes
};

/// Whether two ranks make the same call; a send, whether it is the one a recv waits for (their
/// labels may differ).
bool agree(const Call& a, const Call& b);

/// "all_reduce #17 (bucket 3): 1024 x F32, sum".
std::string describe(const Call& call);

/// Who takes part in a communicator.
struct Group {
  int rank = 0;                  ///< this rank's place in the group
  std::vector<int> world_ranks;  ///< [place in the group] -> rank of the world, for messages
  std::string name = "world";    ///< "dp 1"

  int size() const { return static_cast<int>(world_ranks.size()); }
};

/// "all_reduce #17 (bucket 3): 1024 x F32, sum", with the group where it is not the world.
std::string describe_in(const Group& group, const Call& call);

/// What is known about a rank that did not come.
struct MissingRank {
  int place = 0;      ///< in the group
  std::string state;  ///< "process 1234 is stopped by a signal", or ""
};

/// kCallMismatch on every rank: says what each called. calls[place]; not all agree. The rank that
/// differs from a majority is blamed.
[[noreturn]] void throw_mismatch(const Group& group, std::span<const Call> calls);

/// The same for the two sides of a message, where they differ; `sender` and `receiver` are places.
void require_same_message(const Group& group, int sender, const Call& sent, int receiver,
                          const Call& received);

/// kRankAbsent: "all_reduce #17 (bucket 3) …: rank 2 of 4 absent after 30 s".
[[noreturn]] void throw_absent(const Group& group, const Call& call,
                               std::span<const MissingRank> missing, int64_t waited_ns);

/// What one rank of a group does while others wait for it, as far as they can tell.
struct RankActivity {
  struct Waiting {
    Call call;
    int peer = -1;  ///< of a message: the place of its other side; -1: a collective
  };

  bool silent = false;           ///< its process is stopped, or does not answer
  int64_t arrived = 0;           ///< the last collective to which it has come
  int64_t finished = 0;          ///< the last collective with which it is done
  std::vector<Waiting> waiting;  ///< the calls in which it waits; none: it does something else
  std::string state;             ///< for a note: "process 1234 is stopped by a signal", or ""
};

/// The error of a call that was not done at its deadline. It follows who waits for whom, from the
/// places that the call awaits to the cause, so that every rank of the group names the same one: a
/// rank that is silent or waits in no call is absent (kRankAbsent), and ranks that wait for each
/// other made different calls (kCallMismatch). A rank that only waits in an earlier call, because
/// of another one, is not to blame. `awaited` empty: as this rank's own activity tells.
/// activities[place].
[[noreturn]] void throw_stalled(const Group& group, const Call& call, std::span<const int> awaited,
                                std::span<const RankActivity> activities, int64_t waited_ns);

/// kRankFailed: a peer died, left or gave up; `reason` continues "rank 2 …".
[[noreturn]] void throw_rank_failed(const Group& group, const Call& call, int place,
                                    std::string_view reason);

}  // namespace lockstep
