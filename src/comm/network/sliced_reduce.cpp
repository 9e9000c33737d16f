#include "comm/network/sliced_reduce.hpp"

#include <algorithm>
#include <array>

#include "kernels/reduce_kernels.hpp"

namespace lockstep {
namespace {

// Up to so many bytes from all ranks together, one exchange of everything is faster than two of
// slices.
constexpr int64_t kSmallBytes = 1 << 16;

// A buffer is reduced in parts of this size: what the peers give is held in memory of its own.
constexpr int64_t kPartBytes = 16 << 20;

}  // namespace

SlicedReduce::Blocks SlicedReduce::slices_of(const Buffer& part) const {
  const int64_t ranks = core_.group().size();
  const int64_t element = dtype_bytes(part.dtype);
  Blocks slices;
  int64_t begin = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t count = part.count / ranks + (rank < part.count % ranks ? 1 : 0);
    slices.push_back({static_cast<size_t>(begin * element), static_cast<size_t>(count * element)});
    begin += count;
  }
  return slices;
}

std::byte* SlicedReduce::scratch(size_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

void SlicedReduce::exchange(const NetworkCore::Task& task, const void* input, const Blocks& given,
                            void* output, const Blocks& taken) {
  core_.transfer(task, [&](const auto& api, auto* context, const LockstepTransportCall& call) {
    return api.exchange(context, input, given.data(), output, taken.data(), &call);
  });
}

// Large enough that slices are, and the same on all ranks.
template <class Action>
void SlicedReduce::for_each_part(const Buffer& buffer, Action&& action) const {
  const int64_t element = dtype_bytes(buffer.dtype);
  const int64_t most = kPartBytes / element;
  for (int64_t begin = 0; begin < buffer.count; begin += most) {
    action(Buffer{static_cast<std::byte*>(buffer.data) + begin * element,
                  std::min(most, buffer.count - begin), buffer.dtype});
  }
}

// Every rank gets everything and adds it.
void SlicedReduce::reduce_small(const NetworkCore::Task& task, const Buffer& buffer, ReduceOp op,
                                std::span<const double> factors) {
  const auto ranks = static_cast<size_t>(core_.group().size());
  const auto bytes = static_cast<size_t>(buffer.bytes());
  std::byte* const theirs = scratch(bytes * ranks);
  Blocks taken;
  std::vector<const void*> inputs;
  for (size_t rank = 0; rank < ranks; ++rank) {
    taken.push_back({rank * bytes, bytes});
    inputs.push_back(theirs + rank * bytes);
  }
  inputs[static_cast<size_t>(core_.group().rank)] = buffer.data;
  exchange(task, buffer.data, Blocks(ranks, {0, bytes}), theirs, taken);
  const std::array outputs = {buffer.data};
  lockstep::reduce(buffer.dtype, op, inputs, factors, outputs, buffer.count);
}

// Gives each rank its slice of this rank's part, and reduces this rank's slice of all.
void SlicedReduce::reduce_own_slice(const NetworkCore::Task& task, const Buffer& part, void* result,
                                    ReduceOp op, std::span<const double> factors) {
  const Blocks slices = slices_of(part);
  const auto rank = static_cast<size_t>(core_.group().rank);
  const LockstepTransportBlock own = slices[rank];
  std::byte* const theirs = scratch_.data();
  Blocks taken;
  std::vector<const void*> inputs;
  for (size_t peer = 0; peer < slices.size(); ++peer) {
    taken.push_back({peer * own.bytes, own.bytes});
    inputs.push_back(theirs + peer * own.bytes);
  }
  inputs[rank] = static_cast<const std::byte*>(part.data) + own.offset;
  exchange(task, part.data, slices, theirs, taken);
  const std::array outputs = {result};
  lockstep::reduce(part.dtype, op, inputs, factors, outputs,
                   static_cast<int64_t>(own.bytes) / dtype_bytes(part.dtype));
}

void SlicedReduce::all_reduce(const NetworkCore::Task& task, const Buffer& buffer, ReduceOp op,
                              std::span<const double> factors) {
  const int64_t ranks = core_.group().size();
  if (buffer.bytes() * ranks <= kSmallBytes) return reduce_small(task, buffer, op, factors);
  for_each_part(buffer, [&](const Buffer& part) {
    const Blocks slices = slices_of(part);
    const LockstepTransportBlock own = slices[static_cast<size_t>(core_.group().rank)];
    scratch(slices[0].bytes * slices.size());
    reduce_own_slice(task, part, static_cast<std::byte*>(part.data) + own.offset, op, factors);
    exchange(task, part.data, Blocks(slices.size(), own), part.data, slices);
  });
}

void SlicedReduce::reduce(const NetworkCore::Task& task, const Buffer& buffer, int root,
                          ReduceOp op, std::span<const double> factors) {
  const auto rank = static_cast<size_t>(core_.group().rank);
  const auto to = static_cast<size_t>(root);
  for_each_part(buffer, [&](const Buffer& part) {
    const Blocks slices = slices_of(part);
    const Blocks none(slices.size(), {0, 0});
    const size_t theirs = slices[0].bytes * slices.size();
    std::byte* const spare = scratch(theirs + slices[0].bytes) + theirs;
    if (rank == to) {
      auto* const own = static_cast<std::byte*>(part.data) + slices[rank].offset;
      reduce_own_slice(task, part, own, op, factors);
      return exchange(task, nullptr, none, part.data, slices);
    }
    reduce_own_slice(task, part, spare, op, factors);
    Blocks given = none;
    given[to] = {0, slices[rank].bytes};
    exchange(task, spare, given, nullptr, none);
  });
}

}  // namespace lockstep
