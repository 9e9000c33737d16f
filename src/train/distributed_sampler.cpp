#include "lockstep/distributed_sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <deque>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

// What the copies of a sampler share.
struct DistributedSampler::State {
  int64_t rows;
  int ranks;
  int rank;
  SamplerOptions options;
  int64_t size = 0;

  int64_t epoch = 0;
  int64_t position = 0;             // rows that have reached the training loop
  bool went_there = false;          // by seek(): the next loop begins at the position
  std::vector<int64_t> order = {};  // indices() of this epoch, once they are needed

  // State of the loop over a loader that reset() began.
  int64_t taken = 0;                    // rows up to which the loader has asked
  std::deque<int64_t> on_the_way = {};  // [batch] rows that have not reached the loop yet
  bool counted = false;                 // by batches()

  bool loader_is_ahead() const { return !counted && !on_the_way.empty(); }

  // What the rows are dealt out to: ranks, or virtual shards.
  int64_t parts() const { return options.virtual_shards > 0 ? options.virtual_shards : ranks; }
  int64_t own_parts() const { return parts() / ranks; }
  std::vector<int64_t> batch_at(int64_t begin, int64_t end) const;
};

// `order` has one row of each of this rank's parts, then the next of each: a batch has them part by
// part.
std::vector<int64_t> DistributedSampler::State::batch_at(int64_t begin, int64_t end) const {
  const int64_t own = own_parts();
  if ((end - begin) % own != 0) {
    throw Error(
        Code::kSplit,
        fmt::format("a batch of {} cannot be divided evenly into the {} of this rank",
                    lockstep::counted(end - begin, "row"), lockstep::counted(own, "virtual shard")),
        fmt::format("give each rank a multiple of {} rows: {} over {}", own,
                    lockstep::counted(parts(), "shard"), lockstep::counted(ranks, "rank")));
  }
  std::vector<int64_t> batch;
  batch.reserve(static_cast<size_t>(end - begin));
  for (int64_t part = 0; part < own; ++part) {
    for (int64_t i = begin + part; i < end; i += own) {
      batch.push_back(order[static_cast<size_t>(i)]);
    }
  }
  return batch;
}

DistributedSampler::DistributedSampler(int64_t rows, int ranks, int rank,
                                       const SamplerOptions& options) {
  if (rows < 0) {
    throw Error(Code::kSplit, fmt::format("a data set cannot have {} rows", rows),
                "give the number of its rows");
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    throw Error(Code::kSplit, fmt::format("there is no rank {} of {}", rank, ranks),
                "give world.size() and world.rank(), in this order");
  }
  if (options.virtual_shards < 0 || options.virtual_shards % ranks != 0) {
    throw Error(
        Code::kSplit,
        fmt::format("{} cannot be divided over {}",
                    counted(options.virtual_shards, "virtual shard"), counted(ranks, "rank")),
        "give the virtual_shards of the wrapper's options, a multiple of the ranks");
  }
  state_ = std::make_shared<State>(State{rows, ranks, rank, options});
  const int64_t parts = state_->parts();
  const int64_t of_part = options.drop_last ? rows / parts : (rows + parts - 1) / parts;
  state_->size = of_part * state_->own_parts();
}

int64_t DistributedSampler::epoch() const {
  return state_->epoch;
}

int64_t DistributedSampler::size() const {
  return state_->size;
}

int64_t DistributedSampler::rows() const {
  return state_->rows;
}

int DistributedSampler::ranks() const {
  return state_->ranks;
}

const SamplerOptions& DistributedSampler::options() const {
  return state_->options;
}

std::vector<int64_t> DistributedSampler::indices() const {
  const State& state = *state_;
  torch::Tensor order;  // int64, all rows
  if (state.options.shuffle) {
    const auto seed =
        static_cast<uint64_t>(state.options.seed) + static_cast<uint64_t>(state.epoch);
    order = torch::randperm(state.rows, at::detail::createCPUGenerator(seed), torch::kInt64);
  } else {
    order = torch::arange(state.rows, torch::kInt64);
  }
  const auto* rows = order.data_ptr<int64_t>();
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(state.size));
  // After the last row the order starts again at its beginning: that is the padding.
  const int shift = is_planted(Mutation::kShardShifted) && state.rank > 0 ? 1 : 0;
  const int64_t own = state.own_parts();
  const int64_t first = is_planted(Mutation::kSamplesDuplicated) ? 0 : state.rank * own + shift;
  for (int64_t i = 0; i < state.size / own; ++i) {
    for (int64_t part = 0; part < own; ++part) {
      mine.push_back(rows[(i * state.parts() + first + part) % state.rows]);
    }
  }
  return mine;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (state_->went_there && state_->epoch == epoch) return;
  seek(epoch, 0);
}

std::vector<int64_t> DistributedSampler::next_batch(int64_t count) {
  State& state = *state_;
  if (count < 1) {
    throw Error(Code::kSplit, fmt::format("a batch cannot have {} rows", count),
                "ask for one row or more");
  }
  if (state.size > 0 && state.position == state.size) seek(state.epoch + 1, 0);
  state.went_there = false;
  if (state.order.empty()) state.order = indices();
  const int64_t end = std::min(state.position + count, state.size);
  std::vector<int64_t> batch = state.batch_at(state.position, end);
  state.position = end;
  return batch;
}

int64_t DistributedSampler::position() const {
  if (state_->loader_is_ahead()) {
    throw Error(Code::kUsage,
                fmt::format("a loader has taken {} of this DistributedSampler, and nobody "
                            "counts how many have reached the training loop",
                            counted(state_->taken, "row")),
                "loop over sampler.batches(*loader) instead of *loader");
  }
  return state_->position;
}

void DistributedSampler::seek(int64_t epoch, int64_t position) {
  State& state = *state_;
  if (position < 0 || position > state.size) {
    throw Error(
        Code::kSplit,
        fmt::format("position {} is not in an epoch of {}", position, counted(state.size, "row")),
        "give a position that position() has returned");
  }
  state.epoch = epoch;
  state.position = position;
  state.went_there = true;
  state.order.clear();
  state.on_the_way.clear();
}

void DistributedSampler::reset(torch::optional<size_t> new_size) {
  State& state = *state_;
  if (new_size && static_cast<int64_t>(*new_size) != state.rows) {
    throw Error(Code::kSplit,
                fmt::format("a DistributedSampler of {} cannot become one of {}",
                            counted(state.rows, "row"), *new_size),
                "make another sampler and another loader");
  }
  // Without set_epoch() a further loop repeats the epoch, as PyTorch's does.
  if (!std::exchange(state.went_there, false)) state.position = 0;
  state.order = indices();
  state.taken = state.position;
  state.on_the_way.clear();
  state.counted = false;
}

torch::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  State& state = *state_;
  const int64_t count = std::min(static_cast<int64_t>(batch_size), state.size - state.taken);
  if (count == 0) return torch::nullopt;
  const auto batch = state.batch_at(state.taken, state.taken + count);
  state.taken += count;
  state.on_the_way.push_back(count);
  return std::vector<size_t>(batch.begin(), batch.end());
}

void DistributedSampler::begin_counting(bool in_order) {
  if (!in_order) {
    throw Error(Code::kUsage,
                "a loader without enforce_ordering does not tell which rows have reached the loop",
                "leave enforce_ordering on in its options");
  }
  state_->counted = true;
}

void DistributedSampler::count_batch() {
  State& state = *state_;
  if (state.on_the_way.empty()) {
    throw Error(Code::kUsage, "the loader takes its rows from another sampler",
                "give this DistributedSampler to make_data_loader");
  }
  state.position += state.on_the_way.front();
  state.on_the_way.pop_front();
}

int64_t DistributedSampler::batches_left(size_t batch_size, bool drop_last) const {
  const int64_t left = state_->went_there ? state_->size - state_->position : state_->size;
  const auto each = static_cast<int64_t>(batch_size);
  return drop_last ? left / each : (left + each - 1) / each;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", torch::tensor(epoch()));
  archive.write("position", torch::tensor(position()));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  torch::Tensor epoch;
  torch::Tensor position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  seek(epoch.item<int64_t>(), position.item<int64_t>());
}

}  // namespace lockstep
