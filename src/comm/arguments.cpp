#include "comm/arguments.hpp"

#include <fmt/format.h>

#include <cmath>

#include "kernels/reduce_kernels.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& message, const std::string& help) {
  throw Error(Code::kUsage, message, help);
}

void check_count(int64_t count) {
  if (count < 0) refuse(fmt::format("{} elements", count), "a count is 0 or more");
}

void check_rank(const Group& group, int rank, const char* what) {
  if (rank >= 0 && rank < group.size()) return;
  refuse(fmt::format("{} {} of a group of {}", what, rank, group.size()),
         fmt::format("ranks of this group are 0 to {}", group.size() - 1));
}

void check_op(Dtype dtype, ReduceOp op, double weight) {
  if (!reduces(dtype, op)) {
    refuse(fmt::format("there is no mean of {}", dtype_name(dtype)),
           "use the sum, or convert to a floating-point dtype first");
  }
  if (op == ReduceOp::kMean && !(weight >= 0 && std::isfinite(weight))) {
    refuse(fmt::format("{} cannot be the weight of a mean", weight),
           "a weight is 0 or more, usually the number of samples");
  }
}

void check_sides(int64_t larger, int64_t smaller, int size, Dtype one, Dtype other) {
  check_count(smaller);
  if (one != other) {
    refuse(fmt::format("input and output are {} and {}", dtype_name(one), dtype_name(other)),
           "use one dtype for both");
  }
  if (larger != smaller * size) {
    refuse(fmt::format("{} elements are not {} blocks of {}", larger, size, smaller),
           "the larger side holds one block per rank");
  }
}

}  // namespace

void check_reduce(const Buffer& buffer, ReduceOp op, double weight) {
  check_count(buffer.count);
  check_op(buffer.dtype, op, weight);
}

void check_broadcast(const Group& group, const Buffer& buffer, int root) {
  check_count(buffer.count);
  check_rank(group, root, "root");
}

void check_reduce_scatter(const Group& group, const ConstBuffer& input, const Buffer& output,
                          ReduceOp op, double weight) {
  check_sides(input.count, output.count, group.size(), input.dtype, output.dtype);
  check_op(output.dtype, op, weight);
}

void check_all_gather(const Group& group, const ConstBuffer& input, const Buffer& output) {
  check_sides(output.count, input.count, group.size(), input.dtype, output.dtype);
}

void check_message(const Group& group, int64_t count, int peer) {
  check_count(count);
  check_rank(group, peer, "rank");
}

void check_allocate(int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 50;  // times the number of ranks it is still a number
  if (bytes >= 0 && bytes <= kMost) return;
  refuse(fmt::format("{} bytes of memory", bytes), fmt::format("ask for 0 to {}", kMost));
}

}  // namespace lockstep
