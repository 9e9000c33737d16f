#pragma once

#include <torch/types.h>

#include <map>
#include <span>
#include <vector>

#include "buckets/bucket_plan.hpp"
#include "gradients/trained_parameters.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/gradients.hpp"

namespace lockstep {

/// Gives this tensor's storage memory of its own with the same values, for those who still hold
/// tensors of it. The storage must hold this tensor's elements only.
void move_to_own_memory(const torch::Tensor& kept);

/// The memory of all gradients: allocated once, where peers can reach it, and divided into buckets
/// by a plan. A parameter's grad is a view of its bucket, so there is no second copy.
///
/// Note [Kept gradients]: a user may keep a gradient and drop it from its parameter, as gradient
/// surgery does, and expects its values to stay. So every gradient's part of a bucket has a storage
/// of its own, whose use count tells whether anybody still holds it. Before that part is written
/// for another gradient, the kept tensors get memory of their own.
class GradientBuckets {
 public:
  /// `order` is the expected order of readiness. Collective.
  GradientBuckets(const Communicator& comm, std::span<const TrainedParameter> parameters,
                  std::span<const size_t> order, const BucketLimits& limits);

  /// Divides the same memory by another order. Existing gradients keep their values.
  void arrange(std::span<const size_t> order);

  size_t size() const { return plan_.size(); }
  const PlannedBucket& plan(size_t bucket) const { return plan_[bucket]; }
  size_t bucket_of(size_t parameter) const { return locations_[parameter].bucket; }
  const GradientBucket& bucket(size_t index) const { return buckets_[index]; }

  /// Sets the micro-steps of every bucket for the backward that begins.
  void set_micro_steps(int64_t count);

  /// A fresh view of a parameter's part of its bucket, in the parameter's shape and strides. Nobody
  /// else holds it, so autograd may adopt it as the parameter's grad.
  torch::Tensor view(size_t parameter) const;

  /// The same, to be overwritten with another gradient: see Note [Kept gradients].
  torch::Tensor claim(size_t parameter);

  /// Claims the memory of all parameters. A grad that was a view of it becomes a copy.
  void claim_all();

  /// Whether this gradient is a view of the parameter's part of its bucket.
  bool holds(size_t parameter, const torch::Tensor& gradient) const;

  /// Whether the parameter's grad is.
  bool holds_grad(size_t parameter) const;

  /// Copies a grad from elsewhere into its bucket and makes the view the parameter's grad.
  void adopt_grad(size_t parameter);

 private:
  struct Location {
    size_t bucket = 0;
    int64_t offset = 0;    // in elements from the start of the bucket
    torch::Tensor memory;  // the gradient's elements, flat, with a storage of their own
  };

  torch::Tensor memory_of(const Location& location, size_t parameter) const;

  std::span<const TrainedParameter> parameters_;
  BucketLimits limits_;
  std::vector<ParameterSize> sizes_;           // [parameter]
  std::map<int, torch::Tensor> memory_;        // [device] -> bytes
  std::vector<PlannedBucket> plan_;            // [bucket]
  std::vector<GradientBucket> buckets_;        // [bucket]
  std::vector<Location> locations_;            // [parameter]
  std::vector<std::vector<int64_t>> strides_;  // [parameter]
};

}  // namespace lockstep
