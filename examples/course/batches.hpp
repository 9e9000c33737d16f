#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "course/options.hpp"

namespace course {

struct Batch {
  torch::Tensor x;  // [rows, dim]
  torch::Tensor y;  // [rows, dim]
};

/// A rank's part of every batch.
struct RowBlock {
  int64_t first = 0;
  int64_t count = 0;
};

/// Rank r of R takes the r-th block of batch / R rows. If R does not divide the batch, the first
/// ranks take one row more.
RowBlock rows_of_rank(int64_t batch, int rank, int ranks);

/// The micro-batches of one optimizer step. They are drawn ahead into the host's memory, as a data
/// loader does it, and go to the device one by one.
class StepBatches {
 public:
  /// `tensors`: x and y of each micro-step in turn. `on_get` is called after each get().
  StepBatches(std::vector<torch::Tensor> tensors, torch::Device device,
              std::function<void()> on_get = {})
      : tensors_(std::move(tensors)), device_(device), on_get_(std::move(on_get)) {}

  /// The rows of one micro-step, copied to the device.
  Batch get(int64_t micro) const;

  /// All of them, as they are, or copied to the device: a captured step cannot fetch them itself.
  const std::vector<torch::Tensor>& tensors() const { return tensors_; }
  std::vector<torch::Tensor> on_device() const;
  torch::Device device() const { return device_; }

 private:
  std::vector<torch::Tensor> tensors_;
  torch::Device device_;
  std::function<void()> on_get_;
};

/// The rows to train on: from --data, in order and wrapping round, or generated. A row depends only
/// on the seed and its number, so every program, number of devices and division into micro-batches
/// sees the same rows.
class Batches {
 public:
  Batches(const Options& options, torch::Device device);

  /// Batch number `index`, on the device: all of it, or only some rows.
  Batch get_batch(int64_t index) const { return get_rows(index, {0, batch_}); }
  Batch get_rows(int64_t index, RowBlock rows) const;

  /// These rows of every micro-step of an optimizer step.
  StepBatches draw(int64_t step, RowBlock rows) const;

 private:
  Batch get_host_rows(int64_t index, RowBlock rows) const;
  Batch generate(int64_t index) const;
  Batch take_rows(int64_t first, int64_t count) const;

  int64_t batch_;
  int64_t accum_steps_;
  int64_t dim_;
  int64_t seed_;
  torch::Device device_;
  torch::Tensor x_;  // of --data; undefined if batches are generated
  torch::Tensor y_;
};

}  // namespace course
