#pragma once

#include <string_view>

#include "comm/backend.hpp"

// How backends fill in a Call; numbers and labels of collectives come later.

namespace lockstep {

inline Call make_call(Operation operation, Dtype dtype, int64_t count) {
  Call call;
  call.operation = operation;
  call.dtype = dtype;
  call.count = count;
  return call;
}

inline Call make_reduce_call(Operation operation, Dtype dtype, int64_t count, ReduceOp op,
                             double weight) {
  Call call = make_call(operation, dtype, count);
  call.reduce = op;
  call.weight = weight;
  return call;
}

inline Call make_broadcast_call(const Buffer& buffer, int root) {
  Call call = make_call(Operation::kBroadcast, buffer.dtype, buffer.count);
  call.root = root;
  return call;
}

/// Of a pair of ranks: `sequence` counts their messages.
inline Call make_message_call(Operation operation, int64_t sequence, const ConstBuffer& buffer,
                              int tag, std::string_view label) {
  Call call = make_call(operation, buffer.dtype, buffer.count);
  call.sequence = sequence;
  call.root = tag;
  call.set_label(label);
  return call;
}

}  // namespace lockstep
