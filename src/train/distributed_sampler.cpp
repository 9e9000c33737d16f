#include "lockstep/distributed_sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>

#include "lockstep/error.hpp"

namespace lockstep {

DistributedSampler::DistributedSampler(int64_t rows, int ranks, int rank,
                                       const SamplerOptions& options)
    : rows_(rows), ranks_(ranks), rank_(rank), options_(options) {
  if (rows < 0) {
    throw Error(Code::kSplit, fmt::format("a data set cannot have {} rows", rows),
                "give the number of its rows");
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw Error(Code::kSplit, fmt::format("there is no rank {} of {}", rank, ranks),
                "give world.size() and world.rank(), in this order");
  }
  size_ = options.drop_last ? rows / ranks : (rows + ranks - 1) / ranks;
}

std::vector<int64_t> DistributedSampler::indices() const {
  torch::Tensor order;  // int64, all rows
  if (options_.shuffle) {
    const auto seed = static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(epoch_);
    order = torch::randperm(rows_, at::detail::createCPUGenerator(seed), torch::kInt64);
  } else {
    order = torch::arange(rows_, torch::kInt64);
  }
  const auto* rows = order.data_ptr<int64_t>();
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(size_));
  // After the last row the order starts again at its beginning: that is the padding.
  for (int64_t i = 0; i < size_; ++i) mine.push_back(rows[(i * ranks_ + rank_) % rows_]);
  return mine;
}

std::vector<int64_t> DistributedSampler::next(int64_t count) {
  if (count < 1) {
    throw Error(Code::kSplit, fmt::format("a batch cannot have {} rows", count),
                "ask for one row or more");
  }
  if (size_ > 0 && position_ == size_) seek(epoch_ + 1, 0);
  if (order_.empty()) order_ = indices();
  const int64_t end = std::min(position_ + count, size_);
  const std::vector<int64_t> batch(order_.begin() + position_, order_.begin() + end);
  position_ = end;
  return batch;
}

void DistributedSampler::seek(int64_t epoch, int64_t position) {
  if (position < 0 || position > size_) {
    throw Error(Code::kSplit,
                fmt::format("position {} is not in an epoch of {} rows", position, size_),
                "give a position that position() has returned");
  }
  epoch_ = epoch;
  position_ = position;
  order_.clear();
}

}  // namespace lockstep
