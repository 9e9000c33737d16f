#pragma once

#include <span>

#include "comm/backend.hpp"
#include "comm/gpu/nccl_comm.hpp"

namespace lockstep {

/// Queues NCCL's collectives on one stream, as lockstep defines them. All ranks have agreed on the
/// call; the current GPU is this rank's.
class NcclTransfer {
 public:
  NcclTransfer(NcclComm& comm, const Group& group, CudaStream stream, int64_t deadline_ns)
      : comm_(comm), group_(group), stream_(stream), deadline_ns_(deadline_ns) {}

  /// `factors` of a mean: [place]; none in other operations.
  void all_reduce(const Buffer& buffer, ReduceOp op, std::span<const double> factors) const;
  void reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                      std::span<const double> factors) const;
  void broadcast(const Buffer& buffer, int root) const;
  void all_gather(const ConstBuffer& input, const Buffer& output) const;
  void send(const ConstBuffer& buffer, int to) const;
  void recv(const Buffer& buffer, int from) const;

 private:
  struct Reduction;

  void reduce(const ConstBuffer& input, const Buffer& output, ReduceOp op, bool scatter,
              std::span<const double> factors) const;
  void reduce_scaled(const Reduction& how, const ConstBuffer& input, const Buffer& output,
                     bool scatter, double factor) const;
  void reduce_gathered(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                       bool scatter) const;
  void queue(const Reduction& how, const void* input, const Buffer& output, bool scatter) const;

  NcclComm& comm_;
  const Group& group_;
  CudaStream stream_;
  int64_t deadline_ns_;
};

}  // namespace lockstep
