#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "course/options.hpp"

namespace course {

struct Batch {
  torch::Tensor x;  // [batch, dim]
  torch::Tensor y;  // [batch, dim]
};

/// The rows to train on: from --data, in order and wrapping round, or generated. A row depends on
/// the seed and its number only, so every program, number of devices and division into
/// micro-batches sees the same ones.
class Batches {
 public:
  Batches(const Options& options, torch::Device device);

  /// Batch number `index`, on the device.
  Batch get_batch(int64_t index) const { return get_rows(index, 0, batch_); }

  /// Only `count` rows of it, from row `first` on.
  Batch get_rows(int64_t index, int64_t first, int64_t count) const;

 private:
  Batch get_host_rows(int64_t index, int64_t first, int64_t count) const;
  Batch generate(int64_t index) const;
  Batch take_rows(int64_t first, int64_t count) const;

  friend class MicroBatches;

  int64_t batch_;
  int64_t dim_;
  int64_t seed_;
  torch::Device device_;
  torch::Tensor x_;  // of --data; undefined where batches are generated
  torch::Tensor y_;
};

/// A rank's part of every batch.
struct RowBlock {
  int64_t first = 0;
  int64_t count = 0;
};

/// Rank r of R takes the r-th block of batch / R rows; where R does not divide the batch, the first
/// ranks take one row more.
RowBlock rows_of_rank(int64_t batch, int rank, int ranks);

/// The micro-batches of one optimizer step. They are drawn ahead into the host's memory, as a data
/// loader does it, and go to the device one by one.
class MicroBatches {
 public:
  MicroBatches(const Batches& batches, RowBlock rows, int64_t accum_steps)
      : batches_(batches), rows_(rows), drawn_(2 * static_cast<size_t>(accum_steps)) {}

  /// Draws those of this step.
  void draw(int64_t step);

  /// A copy on the device.
  Batch get(int64_t micro_step) const { return get(drawn_, micro_step); }

  /// All of them, for a step that is given them together: in the host's memory, from where get()
  /// takes one after the other; or on the device, since a captured step cannot fetch them.
  std::vector<torch::Tensor> all(bool on_device) const;
  Batch get(const std::vector<torch::Tensor>& all, int64_t micro_step) const;

 private:
  const Batches& batches_;
  RowBlock rows_;
  std::vector<torch::Tensor> drawn_;  // x and y of each micro-step in turn
};

}  // namespace course
