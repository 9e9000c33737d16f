#include "comm/two_level/two_level_moves.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/reduce_kernels.hpp"
#include "lockstep/error.hpp"

// What all collectives over two levels are made of.

namespace lockstep {
namespace {

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, static_cast<size_t>(bytes));
}

}  // namespace

// Inside a host shared memory divides by the sum of the host's weights; between hosts a host counts
// as much as its ranks together. A host whose ranks all have weight 0 adds nothing.
TwoLevelReduction TwoLevelReduction::of(ReduceOp op, std::span<const Fingerprint> calls,
                                        const HostMap& hosts) {
  TwoLevelReduction how{.op = op};
  if (op != ReduceOp::kMean) return how;
  const std::vector<double> factors = mean_factors(calls);
  for (int host = 0; host < hosts.hosts(); ++host) {
    double sum = 0;
    for (const int rank : hosts.members(host)) sum += factors[static_cast<size_t>(rank)];
    how.factors.push_back(sum);
  }
  const int rank = hosts.members(hosts.host())[static_cast<size_t>(hosts.local_rank())];
  const double of_host = how.factors[static_cast<size_t>(hosts.host())];
  if (of_host > 0) how.weight = calls[static_cast<size_t>(rank)].weight;
  return how;
}

int SliceOwners::leader(const HostMap& hosts, int host) const {
  return root >= 0 && hosts.host_of(root) == host ? hosts.local_rank_of(root) : 0;
}

int SliceOwners::rank(const HostMap& hosts, int host, int owner) const {
  return hosts.members(host)[static_cast<size_t>(leaders ? leader(hosts, host) : owner)];
}

ElementRange SliceOwners::own(const HostMap& hosts, int64_t count) const {
  if (!leaders) return slice_of(count, hosts.local_size(), hosts.local_rank());
  return {0, hosts.local_rank() == leader(hosts, hosts.host()) ? count : 0};
}

TwoLevelMoves::LinkBlocks::LinkBlocks(int ranks, int64_t element_bytes)
    : element_bytes_(element_bytes) {
  blocks.given.resize(static_cast<size_t>(ranks));
  blocks.taken.resize(static_cast<size_t>(ranks));
}

LockstepTransportBlock TwoLevelMoves::LinkBlocks::block(int64_t offset, int64_t count) const {
  return {static_cast<size_t>(offset * element_bytes_),
          static_cast<size_t>(count * element_bytes_)};
}

void TwoLevelMoves::LinkBlocks::give(int rank, int64_t offset, int64_t count) {
  if (count == 0) return;
  blocks.given[static_cast<size_t>(rank)] = block(offset, count);
  empty = false;
}

void TwoLevelMoves::LinkBlocks::take(int rank, int64_t offset, int64_t count) {
  if (count == 0) return;
  blocks.taken[static_cast<size_t>(rank)] = block(offset, count);
  empty = false;
}

TwoLevelMoves::LinkBlocks TwoLevelMoves::link_blocks(Dtype dtype) const {
  return {core_.group().size(), dtype_bytes(dtype)};
}

TwoLevelMoves::OnLink TwoLevelMoves::begin(const Task& task, uint32_t part,
                                           const LinkBlocks& blocks) {
  return blocks.empty ? nullptr : core_.begin_exchange(task, part, blocks.blocks);
}

void TwoLevelMoves::end(const Task& task, OnLink& blocks) {
  if (blocks) core_.end_exchange(task, *blocks);
  blocks.reset();
}

void TwoLevelMoves::call_inside(const Task& task,
                                const std::function<void(const CallContext&)>& calls) {
  try {
    calls({.deadline_ns = task.deadline_ns, .label = {}, .part_of = &task.reported()});
  } catch (const RankError& error) {
    core_.fail_transfer(task, error.message());
  }
}

/// This rank's slice of its host's reduction of a region, which stays as it is but where the slice
/// lies in it.
void TwoLevelMoves::reduce_inside(const Task& task, const ConstBuffer& region, void* slice,
                                  const TwoLevelReduction& how, const SliceOwners& owners) {
  const int64_t bytes = dtype_bytes(region.dtype);
  if (alone()) return copy(slice, region.data, region.bytes());
  // Only its root writes to the buffer of a reduce.
  const auto reduce = [&](int64_t begin, int64_t count, int root, void* out,
                          const CallContext& context) {
    const void* own = byte_at(region.data, begin * bytes);
    const bool is_root = hosts_.local_rank() == root;
    if (is_root) copy(out, own, count * bytes);
    return inside_->reduce({is_root ? out : const_cast<void*>(own), count, region.dtype}, root,
                           how.op, how.weight, context);
  };
  call_inside(task, [&](const CallContext& context) {
    if (owners.leaders) {
      const int leader = owners.leader(hosts_, hosts_.host());
      return reduce(0, region.count, leader, slice, context)->wait();
    }
    const int ranks = hosts_.local_size();
    const int64_t each = region.count / ranks;
    const int64_t even = each * ranks;
    std::unique_ptr<Backend::Work> works[2];
    if (each > 0) {
      works[0] = inside_->reduce_scatter({region.data, even, region.dtype},
                                         {slice, each, region.dtype}, how.op, how.weight, context);
    }
    if (even < region.count) {
      works[1] =
          reduce(even, region.count - even, ranks - 1, byte_at(slice, each * bytes), context);
    }
    for (auto& work : works) {
      if (work) work->wait();
    }
  });
}

/// All slices of a region, which has this rank's already, to all ranks of this host.
void TwoLevelMoves::spread_inside(const Task& task, const Buffer& region,
                                  const SliceOwners& owners) {
  if (alone() || region.count == 0) return;
  const int64_t bytes = dtype_bytes(region.dtype);
  call_inside(task, [&](const CallContext& context) {
    if (owners.leaders) {
      const int leader = owners.leader(hosts_, hosts_.host());
      return inside_->broadcast(region, leader, context)->wait();
    }
    const int ranks = hosts_.local_size();
    const int64_t each = region.count / ranks;
    const int64_t even = each * ranks;
    std::unique_ptr<Backend::Work> works[2];
    if (each > 0) {
      const void* own = byte_at(region.data, hosts_.local_rank() * each * bytes);
      works[0] = inside_->all_gather({own, each, region.dtype}, {region.data, even, region.dtype},
                                     context);
    }
    if (even < region.count) {
      works[1] = inside_->broadcast(
          {byte_at(region.data, even * bytes), region.count - even, region.dtype}, ranks - 1,
          context);
    }
    for (auto& work : works) {
      if (work) work->wait();
    }
  });
}

/// The blocks of this host's ranks, of which each has its own as input, to all of them.
void TwoLevelMoves::gather_inside(const Task& task, const ConstBuffer& input, const Buffer& region,
                                  const std::vector<int64_t>& counts) {
  if (alone()) return copy(region.data, input.data, input.bytes());
  call_inside(task, [&](const CallContext& context) {
    inside_->exchange(input, region, BlockExchange::all_gather(inside_->group(), counts), context)
        ->wait();
  });
}

/// slice = the sums of all hosts: this one's own, and those of the others one after the other.
void TwoLevelMoves::add_hosts(const Buffer& slice, const void* own, const std::byte* others,
                              const TwoLevelReduction& how) const {
  std::vector<const void*> inputs;
  for (int host = 0; host < hosts_.hosts(); ++host) {
    inputs.push_back(is_own(host) ? own : others + other(host) * slice.bytes());
  }
  lockstep::reduce(slice.dtype, how.op, inputs, how.factors, {&slice.data, 1}, slice.count);
}

void TwoLevelMoves::add(std::span<const void* const> inputs, const Buffer& output, ReduceOp op,
                        Calls calls) const {
  const auto how = TwoLevelReduction::of(op, calls, hosts_);
  std::vector<std::vector<std::byte>> sums;
  std::vector<const void*> of_hosts;
  for (int host = 0; host < hosts_.hosts(); ++host) {
    std::vector<const void*> of_host;
    std::vector<double> weights;
    for (const int rank : hosts_.members(host)) {
      of_host.push_back(inputs[static_cast<size_t>(rank)]);
      weights.push_back(calls[static_cast<size_t>(rank)].weight);
    }
    const double weight = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (!(weight > 0)) std::fill(weights.begin(), weights.end(), 1.0);
    sums.emplace_back(static_cast<size_t>(output.bytes()));
    void* sum = sums.back().data();
    if (of_host.size() == 1) {
      copy(sum, of_host.front(), output.bytes());
    } else {
      const auto factors = mean_factors(calls.front(), weights);
      lockstep::reduce(output.dtype, op, of_host, factors, {&sum, 1}, output.count);
    }
    of_hosts.push_back(sum);
  }
  if (of_hosts.size() == 1) return copy(output.data, of_hosts.front(), output.bytes());
  lockstep::reduce(output.dtype, op, of_hosts, how.factors, {&output.data, 1}, output.count);
}

std::byte* TwoLevelMoves::scratch(size_t slot, int64_t bytes) {
  if (scratch_.size() <= slot) scratch_.resize(slot + 1);
  auto& memory = scratch_[slot];
  if (memory.size() < static_cast<size_t>(bytes)) memory.resize(static_cast<size_t>(bytes));
  return memory.data();
}

}  // namespace lockstep
