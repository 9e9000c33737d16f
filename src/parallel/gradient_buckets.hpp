#pragma once

#include <torch/types.h>

#include <map>
#include <span>
#include <string>
#include <vector>

#include "buckets/bucket_plan.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/distributed_data_parallel.hpp"

namespace lockstep {

/// A parameter that is trained, under its full name.
struct TrainedParameter {
  std::string name;
  torch::Tensor tensor;
};

/// The memory of all gradients: allocated once, where peers can reach it, and cut into buckets by a
/// plan. A parameter's grad is a view of its place here: there is no second copy.
///
/// Note [Kept gradients]: a user may keep a gradient and drop it from its parameter, as gradient
/// surgery does, and expects it to stay what it was. So every place has a storage of its own, whose
/// use count tells whether anybody still looks at it. Before a place is written for another
/// gradient, what is kept there moves to memory of its own, and the kept tensors with it.
class GradientBuckets {
 public:
  /// Collective. `order` is the expected order of readiness.
  GradientBuckets(const Communicator& comm, std::span<const TrainedParameter> parameters,
                  std::span<const size_t> order, const BucketLimits& limits);

  /// Cuts the same memory by another order. Gradients that are there keep their values.
  void arrange(std::span<const size_t> order);

  size_t size() const { return plan_.size(); }
  const PlannedBucket& plan(size_t bucket) const { return plan_[bucket]; }
  size_t bucket_of(size_t parameter) const { return place_[parameter].bucket; }
  const GradientBucket& bucket(size_t index) const { return buckets_[index]; }

  /// Of every bucket, for the backward that begins.
  void set_micro_steps(int64_t count);

  /// A fresh view of a parameter's place, of its shape and strides. Nobody else holds it, so that
  /// autograd may adopt it as the parameter's grad.
  torch::Tensor view(size_t parameter) const;

  /// The same, to be overwritten with another gradient than the one that is there: see Note [Kept
  /// gradients].
  torch::Tensor claim(size_t parameter);

  /// Claims all places, also those that are their parameter's grad, which becomes a copy.
  void claim_all();

  /// Whether the parameter's grad is that view.
  bool holds_grad(size_t parameter) const;

  /// Copies a grad from elsewhere into its place, and makes the view the parameter's grad.
  void adopt_grad(size_t parameter);

 private:
  struct Place {
    size_t bucket = 0;
    int64_t offset = 0;    // elements from the bucket's begin
    torch::Tensor memory;  // its elements, flat, on a storage of their own
  };

  torch::Tensor memory_of(const Place& place, size_t parameter) const;

  std::span<const TrainedParameter> parameters_;
  BucketLimits limits_;
  std::vector<ParameterSize> sizes_;           // [parameter]
  std::map<int, torch::Tensor> memory_;        // [device] -> bytes
  std::vector<PlannedBucket> plan_;            // [bucket]
  std::vector<GradientBucket> buckets_;        // [bucket]
  std::vector<Place> place_;                   // [parameter]
  std::vector<std::vector<int64_t>> strides_;  // [parameter]
};

}  // namespace lockstep
