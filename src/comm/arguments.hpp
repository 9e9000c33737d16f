#pragma once

#include <string_view>

#include "comm/backend.hpp"

namespace lockstep {

// How backends fill in a Fingerprint; numbers and labels of collectives come later.

inline Fingerprint make_fingerprint(Operation operation, Dtype dtype, int64_t count) {
  Fingerprint call;
  call.operation = operation;
  call.dtype = dtype;
  call.count = count;
  return call;
}

inline Fingerprint make_reduce_fingerprint(Operation operation, Dtype dtype, int64_t count,
                                           ReduceOp op, double weight) {
  Fingerprint call = make_fingerprint(operation, dtype, count);
  call.reduce = op;
  call.weight = weight;
  return call;
}

inline Fingerprint make_exchange_fingerprint(Dtype dtype, const BlockExchange& blocks) {
  Fingerprint call = make_fingerprint(blocks.operation, dtype, blocks.count);
  call.root = blocks.root;
  return call;
}

inline Fingerprint make_rooted_reduce_fingerprint(const Buffer& buffer, int root, ReduceOp op,
                                                  double weight) {
  Fingerprint call =
      make_reduce_fingerprint(Operation::kReduce, buffer.dtype, buffer.count, op, weight);
  call.root = root;
  return call;
}

inline Fingerprint make_broadcast_fingerprint(const Buffer& buffer, int root) {
  Fingerprint call = make_fingerprint(Operation::kBroadcast, buffer.dtype, buffer.count);
  call.root = root;
  return call;
}

/// The fingerprint of a message between two ranks; `sequence` counts their messages.
inline Fingerprint make_message_fingerprint(Operation operation, int64_t sequence,
                                            const ConstBuffer& buffer, int tag,
                                            std::string_view label) {
  Fingerprint call = make_fingerprint(operation, buffer.dtype, buffer.count);
  call.sequence = sequence;
  call.root = tag;
  call.set_label(label);
  return call;
}

// What every backend refuses before it does anything: kUsage, on this rank alone. The communicator
// stays usable, since nothing was begun.

void check_reduce(const Buffer& buffer, ReduceOp op, double weight);
void check_broadcast(const Group& group, const Buffer& buffer, int root);
void check_rooted_reduce(const Group& group, const Buffer& buffer, int root, ReduceOp op,
                         double weight);
void check_exchange(const Group& group, const ConstBuffer& input, const Buffer& output,
                    const BlockExchange& blocks);
void check_reduce_scatter(const Group& group, const ConstBuffer& input, const Buffer& output,
                          ReduceOp op, double weight);
void check_all_gather(const Group& group, const ConstBuffer& input, const Buffer& output);
void check_message(const Group& group, int64_t count, int peer);
void check_allocate(int64_t bytes);

/// What all ranks say of an exchange: given and taken counts, [group rank] in each.
using ExchangedCounts = std::vector<std::vector<int64_t>>;

/// kCallMismatch, the same on every rank, unless each rank takes what its peers give it.
/// given[from][to], taken[to][from].
void require_same_counts(const Group& group, const Fingerprint& call, const ExchangedCounts& given,
                         const ExchangedCounts& taken);

}  // namespace lockstep
