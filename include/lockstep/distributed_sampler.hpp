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

  /// Call it before each epoch; otherwise every epoch has the same order.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  int64_t size() const { return size_; }  ///< rows of each rank
  std::vector<int64_t> indices() const;

 private:
  int64_t rows_;
  int ranks_;
  int rank_;
  SamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t size_ = 0;
};

}  // namespace lockstep
