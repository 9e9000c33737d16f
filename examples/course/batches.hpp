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
  Batch get_batch(int64_t index) const;

 private:
  Batch generate(int64_t index) const;
  Batch take_rows(int64_t index) const;

  int64_t batch_;
  int64_t dim_;
  int64_t seed_;
  torch::Device device_;
  torch::Tensor x_;  // of --data; undefined where batches are generated
  torch::Tensor y_;
};

}  // namespace course
