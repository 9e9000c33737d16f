#pragma once

#include "comm/backend.hpp"

// What every backend refuses before it does anything: kUsage, on this rank alone. The communicator
// stays usable, since nothing was begun.

namespace lockstep {

void check_reduce(const Buffer& buffer, ReduceOp op, double weight);
void check_broadcast(const Group& group, const Buffer& buffer, int root);
void check_reduce_scatter(const Group& group, const ConstBuffer& input, const Buffer& output,
                          ReduceOp op, double weight);
void check_all_gather(const Group& group, const ConstBuffer& input, const Buffer& output);
void check_message(const Group& group, int64_t count, int peer);
void check_allocate(int64_t bytes);

}  // namespace lockstep
