#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/lockstep.hpp"
#include "model.hpp"
#include "token_file.hpp"

namespace gpt2 {

/// How a model lies on the ranks. What the flags leave are data-parallel ranks.
struct Layout {
  int64_t stages = 1;           // of a pipeline over ranks
  int64_t micro_batches = 0;    // of the pipeline; 0: two for each stage
  int64_t tensor_parallel = 1;  // ranks that share each matrix
  bool sequence_parallel = false;
  int64_t shard = 0;           // ZeRO's stage over the data ranks; 0: DDP
  int64_t virtual_shards = 0;  // parts of a batch whose bits depend on no number of data ranks
};

/// The axes of the world: data ranks with other rows, pipeline ranks with other stages, tensor
/// ranks with other slices.
lockstep::Mesh make_mesh(const lockstep::Communicator& world, const Layout& layout);

struct NamedParameter {
  std::string name;
  torch::Tensor parameter;
};

/// A GPT-2 that trains and is evaluated the same way in every layout.
class ParallelModel {
 public:
  virtual ~ParallelModel() = default;

  /// Forward and backward of this data rank's rows in parts, whose gradients add up and are
  /// averaged over the data ranks once. Returns the mean loss of these rows; with virtual shards
  /// that of all data ranks' rows.
  virtual double accumulate(const std::vector<Batch>& parts) = 0;

  /// The mean loss of these rows and how many targets it is the mean of, without gradients.
  virtual std::pair<double, int64_t> evaluate(const Batch& batch) = 0;

  /// What an optimizer updates, with names.
  virtual std::vector<NamedParameter> parameters() const = 0;
  virtual void add_to(lockstep::Checkpoint& checkpoint, torch::optim::Optimizer& optimizer) = 0;

  /// All weights, whole, under their names, on the ranks that are data rank 0. Collective.
  virtual lockstep::TensorMap whole_weights() = 0;
};

std::unique_ptr<ParallelModel> make_parallel_model(const Config& config, const Weights& weights,
                                                   const Layout& layout, const lockstep::Mesh& mesh,
                                                   lockstep::Device& device, bool autocast);

}  // namespace gpt2
