#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// This parameter is one slice of a tensor whose other slices the other ranks of `axis` have. The
/// note ends with the axis.
void note_tensor_shard(const torch::Tensor& parameter,
                       const std::shared_ptr<const Communicator>& axis);

/// This parameter belongs to a stage of a pipeline whose other stages the other ranks of `axis`
/// have. The note ends with the axis.
void note_pipeline_stage(const torch::Tensor& parameter,
                         const std::shared_ptr<const Communicator>& axis);

/// The ranks that hold other parts of the model that an optimizer updates: what concerns the whole
/// model, its gradient's norm and whether a step is skipped, they must agree on. Slices and stages
/// that lockstep has made itself are known; `others` are ranks that the user names besides.
///
/// Calls are collective over all of these ranks.
class ModelParallelGroup {
 public:
  explicit ModelParallelGroup(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                              const std::optional<Communicator>& others = {});

  /// Whether this rank has the whole model.
  bool alone() const { return tensor_axes_.empty() && !pipeline_ && !others_; }

  /// How many sums of squares this rank must make: see part_of().
  size_t parts() const { return 1 + tensor_axes_.size(); }

  /// Which of them the gradient of this parameter belongs to: 0 where it is whole.
  size_t part_of(const torch::Tensor& parameter) const;

  /// The sum over the whole model, from this rank's parts: double scalars on one device.
  torch::Tensor sum(std::vector<torch::Tensor> parts) const;

  /// The rank, in the world, of another rank that says so; -1: none does.
  int first_other(bool mine) const;

 private:
  struct TensorAxis {
    std::vector<int> ranks;  // in the world
    Communicator comm;
  };

  size_t find_axis(const Communicator& axis);
  std::vector<const Communicator*> communicators() const;

  std::vector<TensorAxis> tensor_axes_;
  std::unordered_map<const c10::TensorImpl*, size_t> part_;  // of slices
  std::optional<Communicator> pipeline_;
  std::optional<Communicator> others_;
};

}  // namespace lockstep
