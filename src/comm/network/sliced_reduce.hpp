#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "comm/backend.hpp"
#include "comm/network/network_core.hpp"

namespace lockstep {

/// Reductions over a module that only moves data. Every rank gets one slice of the elements from
/// all ranks, adds them in the order of the ranks, and gives the sum to those that want it. Each
/// element is rounded once, so that the result has the bits of shared memory's, on every rank and
/// in every run.
///
/// One collective at a time may use it, in the body of its task. `factors` as of reduce().
class SlicedReduce {
 public:
  explicit SlicedReduce(NetworkCore& core) : core_(core) {}

  /// In place.
  void all_reduce(const NetworkCore::Task& task, const Buffer& buffer, ReduceOp op,
                  std::span<const double> factors);

  /// Into the root's buffer; the others' stay as they are.
  void reduce(const NetworkCore::Task& task, const Buffer& buffer, int root, ReduceOp op,
              std::span<const double> factors);

 private:
  using Blocks = std::vector<LockstepTransportBlock>;  // [group rank]

  void reduce_small(const NetworkCore::Task& task, const Buffer& buffer, ReduceOp op,
                    std::span<const double> factors);
  void reduce_own_slice(const NetworkCore::Task& task, const Buffer& part, void* result,
                        ReduceOp op, std::span<const double> factors);
  void exchange(const NetworkCore::Task& task, const void* input, const Blocks& given, void* output,
                const Blocks& taken);
  Blocks slices_of(const Buffer& part) const;
  std::byte* scratch(size_t bytes);

  template <class Action>
  void for_each_part(const Buffer& buffer, Action&& action) const;

  NetworkCore& core_;
  std::vector<std::byte> scratch_;  // grows to what a call needed
};

}  // namespace lockstep
