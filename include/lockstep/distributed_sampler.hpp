#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

/// The order of the rows, and what happens if ranks do not divide them.
struct SamplerOptions {
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;  ///< drop the last rows instead of repeating the first

  /// As DdpOptions::virtual_shards: the rule is applied to these parts instead of the ranks, and
  /// a batch is the rows of this rank's parts, one part after the other. So each part of each step
  /// has the same rows on every number of ranks. 0: off.
  int64_t virtual_shards = 0;
};

template <class Loader>
class LoaderBatches;

/// Chooses the rows of a data set that this rank trains on, by the rule of
/// torch.utils.data.DistributedSampler: a permutation from seed + epoch is padded by repetition (or
/// cut) to a multiple of the R ranks, and rank r takes every R-th row of it, starting at r.
///
/// It is a sampler for torch::data's loaders, and gives rows to programs without one:
///
///     lockstep::DistributedSampler sampler(rows, world.size(), world.rank());
///     auto loader = lockstep::make_data_loader(std::move(dataset), sampler, options);
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : sampler.batches(*loader)) ...
///     }
///
/// This is a handle: copies, such as the loader's, share the epoch and the position. One thread
/// uses them, which may not be a worker of the loader.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  DistributedSampler(int64_t rows, int ranks, int rank, const SamplerOptions& options = {});

  /// Call it before each epoch; otherwise every epoch has the same order. next_batch() does so
  /// itself. The epoch that seek() or a Checkpoint chose continues from its position.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;

  int64_t size() const;  ///< rows of each rank
  std::vector<int64_t> indices() const;

  /// The rows of the next batch: `count` of them, or fewer at the end of an epoch. The call after
  /// that begins the next epoch.
  std::vector<int64_t> next_batch(int64_t count);

  /// The batches of a loader that has this sampler, to loop over in place of the loader itself. A
  /// loader with workers is ahead of the loop; this counts what has reached the loop, so that a
  /// Checkpoint can save it. Its size() is the number of batches.
  template <class Loader>
  LoaderBatches<Loader> batches(Loader& loader) {
    return LoaderBatches<Loader>(*this, loader);
  }

  /// How many rows of the epoch next_batch() or batches() has given to this rank. An Error if a
  /// loader has taken rows and it is not counted which of them have reached the loop.
  int64_t position() const;

  /// Continues from there: the next batch, or the next loop over the loader, begins with that row.
  void seek(int64_t epoch, int64_t position);

  int64_t rows() const;
  int ranks() const;
  const SamplerOptions& options() const;

  /// For torch::data's loaders. A loop over a loader begins with reset() and asks for the rows of
  /// this epoch, from its beginning or from where seek() went.
  void reset(torch::optional<size_t> new_size = torch::nullopt) override;
  torch::optional<std::vector<size_t>> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  template <class Loader>
  friend class LoaderBatches;
  struct State;

  // For LoaderBatches: a loop begins, and a batch has reached it.
  void begin_counting(bool in_order);
  void count_batch();
  int64_t batches_left(size_t batch_size, bool drop_last) const;

  std::shared_ptr<State> state_;
};

/// See DistributedSampler::batches().
template <class Loader>
class LoaderBatches {
 public:
  LoaderBatches(DistributedSampler sampler, Loader& loader)
      : sampler_(std::move(sampler)), loader_(&loader) {}

  struct End {};

  class Iterator {
   public:
    bool operator!=(End) { return at_ != loader_->end(); }
    auto& operator*() {
      auto& batch = *at_;
      if (!std::exchange(counted_, true)) sampler_.count_batch();
      return batch;
    }
    Iterator& operator++() {
      ++at_;
      counted_ = false;
      return *this;
    }

   private:
    friend class LoaderBatches;
    using Position = decltype(std::declval<Loader&>().begin());
    Iterator(const DistributedSampler& sampler, Loader& loader)
        : sampler_(sampler), loader_(&loader), at_(loader.begin()) {}

    DistributedSampler sampler_;
    Loader* loader_;
    Position at_;
    bool counted_ = false;  // the batch that it is at
  };

  Iterator begin() {
    Iterator first(sampler_, *loader_);
    sampler_.begin_counting(loader_->options().enforce_ordering);
    return first;
  }
  End end() const { return {}; }

  /// How many batches a loop that begins now would see.
  int64_t size() const {
    return sampler_.batches_left(loader_->options().batch_size, loader_->options().drop_last);
  }

 private:
  DistributedSampler sampler_;
  Loader* loader_;
};

}  // namespace lockstep
