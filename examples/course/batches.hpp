#pragma once

#include <torch/types.h>

#include <cstdint>

#include "course/options.hpp"

namespace course {

struct Batch {
  torch::Tensor x;  // [batch, dim]
  torch::Tensor y;  // [batch, dim]
};

/// The rows to train on: from --data, in order and wrapping round, or generated. A batch depends on
/// the seed and its number only, so every program and every number of devices sees the same ones.
class Batches {
 public:
  Batches(const Options& options, torch::Device device);

  /// Batch number `index`, on the device.
  Batch get_batch(int64_t index) const { return get_rows(index, 0, batch_); }

  /// Only `count` rows of it, from row `first` on.
  Batch get_rows(int64_t index, int64_t first, int64_t count) const;

 private:
  Batch generate(int64_t index) const;
  Batch take_rows(int64_t first, int64_t count) const;

  int64_t batch_;
  int64_t dim_;
  int64_t seed_;
  torch::Device device_;
  torch::Tensor x_;  // of --data; undefined where batches are generated
  torch::Tensor y_;
};

}  // namespace course
