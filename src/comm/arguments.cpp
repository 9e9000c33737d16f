#include "comm/arguments.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "comm/failure.hpp"
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

void check_rooted_reduce(const Group& group, const Buffer& buffer, int root, ReduceOp op,
                         double weight) {
  check_reduce(buffer, op, weight);
  check_rank(group, root, "root");
}

void check_exchange(const Group& group, const ConstBuffer& input, const Buffer& output,
                    const BlockExchange& blocks) {
  const auto ranks = static_cast<size_t>(group.size());
  if (blocks.given.size() != ranks || blocks.taken.size() != ranks) {
    refuse(fmt::format("{} counts to give and {} to take in a group of {}", blocks.given.size(),
                       blocks.taken.size(), ranks),
           "say one count for each rank, 0 for those that get nothing");
  }
  for (const int64_t count : blocks.given) check_count(count);
  for (const int64_t count : blocks.taken) check_count(count);
  if (blocks.root >= 0) check_rank(group, blocks.root, "root");
  if (input.dtype != output.dtype) {
    refuse(fmt::format("input and output are {} and {}", dtype_name(input.dtype),
                       dtype_name(output.dtype)),
           "use one dtype for both");
  }
  if (input.count != blocks.given_count() || output.count != blocks.taken_count()) {
    refuse(fmt::format("{} elements to give and {} to take, but the blocks have {} and {}",
                       input.count, output.count, blocks.given_count(), blocks.taken_count()),
           "the counts must add up to what the tensors hold");
  }
}

void require_same_counts(const Group& group, const Fingerprint& call, const ExchangedCounts& given,
                         const ExchangedCounts& taken) {
  for (size_t from = 0; from < given.size(); ++from) {
    for (size_t to = 0; to < taken.size(); ++to) {
      if (given[from][to] == taken[to][from]) continue;
      const std::string text = fmt::format(
          "{}: rank {} gives {} elements to rank {}, which takes {}", describe_in(group, call),
          group.world_ranks[from], given[from][to], group.world_ranks[to], taken[to][from]);
      throw CollectiveError(Code::kCallMismatch, -1,
                            {.code = Code::kCallMismatch, .by = group.rank, .text = text}, text,
                            "what a rank gives to a peer must be what the peer takes from it");
    }
  }
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

namespace {

int64_t sum_of(const std::vector<int64_t>& counts, size_t first) {
  return std::accumulate(counts.begin(), counts.begin() + static_cast<ptrdiff_t>(first),
                         int64_t{0});
}

std::vector<int64_t> counts_of_all(const Group& group, int64_t count) {
  return std::vector<int64_t>(static_cast<size_t>(group.size()), count);
}

std::vector<int64_t> counts_of_one(const Group& group, int rank, int64_t count) {
  check_rank(group, rank, "root");
  std::vector<int64_t> counts = counts_of_all(group, 0);
  counts[static_cast<size_t>(rank)] = count;
  return counts;
}

}  // namespace

int64_t BlockExchange::given_offset(int peer) const {
  return same_for_all() ? 0 : sum_of(given, static_cast<size_t>(peer));
}

int64_t BlockExchange::taken_offset(int peer) const {
  return sum_of(taken, static_cast<size_t>(peer));
}

int64_t BlockExchange::given_count() const {
  return same_for_all() ? given.front() : sum_of(given, given.size());
}

int64_t BlockExchange::taken_count() const {
  return sum_of(taken, taken.size());
}

BlockExchange BlockExchange::all_to_all(std::vector<int64_t> given, std::vector<int64_t> taken) {
  return {.given = std::move(given), .taken = std::move(taken)};
}

BlockExchange BlockExchange::all_to_all(const Group& group, int64_t count) {
  return {
      .count = count, .given = counts_of_all(group, count), .taken = counts_of_all(group, count)};
}

BlockExchange BlockExchange::gather(const Group& group, int64_t count, int root) {
  return {.operation = Operation::kGather,
          .root = root,
          .count = count,
          .given = counts_of_one(group, root, count),
          .taken = counts_of_all(group, group.rank == root ? count : 0)};
}

BlockExchange BlockExchange::scatter(const Group& group, int64_t count, int root) {
  return {.operation = Operation::kScatter,
          .root = root,
          .count = count,
          .given = counts_of_all(group, group.rank == root ? count : 0),
          .taken = counts_of_one(group, root, count)};
}

BlockExchange BlockExchange::all_gather(const Group& group, std::vector<int64_t> counts) {
  const int64_t own = counts.at(static_cast<size_t>(group.rank));
  return {.operation = Operation::kAllGather,
          .given = counts_of_all(group, own),
          .taken = std::move(counts)};
}

}  // namespace lockstep
