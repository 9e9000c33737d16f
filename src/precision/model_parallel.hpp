#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// Notes that this parameter is a slice of a tensor, and that the other ranks of `axis` have the
/// other slices. The note ends with the axis.
void note_tensor_shard(const torch::Tensor& parameter,
                       const std::shared_ptr<const Communicator>& axis);

/// Notes that `shard` is the part of this parameter that this rank updates, and that the other
/// data-parallel ranks, those of `axis`, have the other parts. What was noted of the parameter, as
/// that it is a slice along a tensor axis, holds for its shards too. The note ends with the axis.
void note_data_shard(const torch::Tensor& shard, const torch::Tensor& parameter,
                     const std::shared_ptr<const Communicator>& axis);

/// Notes that this parameter belongs to a stage of a pipeline, and that the other ranks of `axis`
/// have the other stages. The note ends with the axis.
void note_pipeline_stage(const torch::Tensor& parameter,
                         const std::shared_ptr<const Communicator>& axis);

/// Notes that this parameter is a copy of one that another rank of the model has: the norm of the
/// whole model counts it there.
void note_copy(const torch::Tensor& parameter);

/// Notes that this parameter is trained with virtual shards: its norm must be the same bits
/// whatever ranks hold parts of the model.
void note_same_bits(const torch::Tensor& parameter);

/// The ranks that hold the other parts of the model that an optimizer updates. They must agree on
/// what concerns the whole model: the norm of its gradients, and whether a step is skipped. Slices
/// and stages that lockstep has made are known; `others` are further ranks, named by the user.
///
/// sum() and first_other() are collective over all of these ranks.
class ModelParallelGroup {
 public:
  explicit ModelParallelGroup(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                              const std::optional<Communicator>& others = {});

  /// Whether this rank has the whole model.
  bool alone() const { return axes_.empty() && !pipeline_ && !others_; }

  /// Whether the norm must be the same bits however the model is divided: see note_same_bits().
  bool same_bits() const { return same_bits_; }

  /// How many sums of squares this rank must compute: see part_of().
  size_t parts() const { return parts_.size() + (has_copies_ ? 1 : 0); }

  /// Which of them the gradient of this parameter belongs to: 0 if this rank has all of the
  /// parameter, the last if it is a copy, which sum() leaves out, and otherwise one for all
  /// parameters that are divided over the same axes.
  size_t part_of(const torch::Tensor& parameter) const;

  /// Returns the sum over the whole model, a double scalar. `parts` are this rank's, on one device:
  /// double scalars, or the words of exact_squares() if same_bits().
  torch::Tensor sum(std::vector<torch::Tensor> parts) const;

  /// Returns the world rank of another rank whose `mine` is true; -1: there is none.
  int first_other(bool mine) const;

 private:
  static constexpr size_t kCopies = static_cast<size_t>(-1);  // in part_: the last

  struct Axis {
    std::vector<int> ranks;  // in the world
    Communicator comm;
  };

  size_t find_axis(const Communicator& axis);
  size_t find_part(const std::vector<size_t>& axes);
  torch::Tensor is_counted_here(torch::Device device) const;
  std::vector<const Communicator*> divided_over() const;   // the axes that lockstep knows
  std::vector<const Communicator*> communicators() const;  // these, and others_

  std::vector<Axis> axes_;
  std::vector<std::vector<size_t>> parts_ = {{}};  // [part]: the axes that it is divided over
  std::unordered_map<const c10::TensorImpl*, size_t> part_;  // of divided parameters and copies
  bool has_copies_ = false;
  bool same_bits_ = false;
  std::optional<Communicator> pipeline_;
  std::optional<Communicator> others_;
};

}  // namespace lockstep
