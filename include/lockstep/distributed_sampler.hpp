#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// The order of the rows, and what happens if ranks do not divide them.
struct SamplerOptions {
  bool shuffle = true;
  int64_t seed = 0;
  bool drop_last = false;  ///< drop the last rows instead of repeating the first
};

/// Chooses the rows of a data set that this rank trains on, by the rule of
/// torch.utils.data.DistributedSampler: a permutation from seed + epoch is padded by repetition (or
/// cut) to a multiple of the R ranks, and rank r takes every R-th row of it, starting at r.
class DistributedSampler {
 public:
  DistributedSampler(int64_t rows, int ranks, int rank, const SamplerOptions& options = {});

  /// Call it before each epoch; otherwise every epoch has the same order. next() does so itself.
  void set_epoch(int64_t epoch) { seek(epoch, 0); }
  int64_t epoch() const { return epoch_; }

  int64_t size() const { return size_; }  ///< rows of each rank
  std::vector<int64_t> indices() const;

  /// The rows of the next batch: `count` of them, or fewer at the end of an epoch. The call after
  /// that begins the next epoch.
  std::vector<int64_t> next(int64_t count);

  /// How many rows of the epoch next() has given to this rank.
  int64_t position() const { return position_; }

  /// Goes on from there.
  void seek(int64_t epoch, int64_t position);

  int64_t rows() const { return rows_; }
  int ranks() const { return ranks_; }
  const SamplerOptions& options() const { return options_; }

 private:
  int64_t rows_;
  int ranks_;
  int rank_;
  SamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t size_ = 0;
  int64_t position_ = 0;
  std::vector<int64_t> order_;  // indices() of this epoch, once next() needs them
};

}  // namespace lockstep
