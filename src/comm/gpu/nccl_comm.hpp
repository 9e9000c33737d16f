#pragma once

#include <nccl.h>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string_view>

#include "comm/backend.hpp"

namespace lockstep {

// Only builds with NCCL have this.

/// Turns an ncclResult_t that is not success into an Error: kRankFailed if NCCL lost a peer,
/// kBackend otherwise.
void check_nccl(ncclResult_t result, ncclComm_t comm, std::string_view call);

/// One NCCL communicator. It never blocks: what NCCL still works on when a call returns is awaited
/// here, up to a deadline. Any thread may abort it meanwhile.
class NcclComm {
 public:
  /// Collective, on the current GPU; `id` is the one that rank 0 has made.
  NcclComm(const ncclUniqueId& id, int rank, int size, int64_t deadline_ns);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Makes an NCCL call, whose name is `what`, and waits until NCCL has queued its work.
  void run(std::string_view what, int64_t deadline_ns,
           const std::function<ncclResult_t(ncclComm_t)>& call);

  /// Throws what NCCL has found in the background, such as a lost connection.
  void check_health();

  /// Ends its kernels and frees it.
  void abort() noexcept;

 private:
  ncclResult_t state();
  void settle(std::string_view what, int64_t deadline_ns);

  std::mutex mutex_;  // guards comm_, which another thread may abort
  ncclComm_t comm_ = nullptr;
};

/// Queues NCCL's collectives on one stream, as lockstep defines them. All ranks have agreed on the
/// call; the current GPU is this rank's.
class NcclTransfer {
 public:
  NcclTransfer(NcclComm& comm, const Group& group, CudaStream stream, int64_t deadline_ns)
      : comm_(comm), group_(group), stream_(stream), deadline_ns_(deadline_ns) {}

  /// `factors` of a mean: [rank]; none in other operations.
  void all_reduce(const Buffer& buffer, ReduceOp op, std::span<const double> factors) const;
  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                      std::span<const double> factors) const;
  void broadcast(const Buffer& buffer, int root) const;
  void all_gather(const ConstBuffer& input, const Buffer& output) const;
  /// The result is the root's; the others' buffers stay as they are.
  void reduce(const Buffer& buffer, int root, ReduceOp op, std::span<const double> factors) const;
  void exchange(const ConstBuffer& input, const Buffer& output, const BlockExchange& blocks) const;

  /// A message of this rank: `data` is sent to the peer, or comes from it.
  struct Message {
    bool sends;
    void* data;
    int64_t bytes;
    int peer;
  };
  /// As one group: NCCL moves them at the same time, in whatever order the peers have theirs.
  void messages(std::span<const Message> messages) const;

 private:
  struct Reduction;
  /// Which rank gets which part of a reduction.
  struct Result {
    bool scattered = false;
    int root = -1;  ///< the only one that gets it; -1: all do
  };

  void reduce(const ConstBuffer& input, const Buffer& output, ReduceOp op, Result result,
              std::span<const double> factors) const;
  void reduce_scaled(const Reduction& how, const ConstBuffer& input, const Buffer& output,
                     Result result, double factor) const;
  void reduce_gathered(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                       Result result) const;
  void queue(const Reduction& how, const void* input, const Buffer& output, Result result) const;

  NcclComm& comm_;
  const Group& group_;
  CudaStream stream_;
  int64_t deadline_ns_;
};

}  // namespace lockstep
