#pragma once

#include <torch/types.h>

#include <map>
#include <span>

#include "gradients/gradient_buckets.hpp"
#include "gradients/trained_parameters.hpp"

namespace lockstep {

/// Records for `lockstep verify` what this rank contributes to the average of a bucket.
void record_local(const GradientBuckets& buckets, size_t bucket,
                  std::span<const TrainedParameter> parameters, double weight);

/// The bugs that `lockstep verify --mutate` plants in what a Reducer averages.
class SpoiledGradients {
 public:
  /// A bucket is about to be sent.
  void launched(const GradientBuckets& buckets, size_t bucket);

  /// All buckets hold the means of this many ranks.
  void averaged(const GradientBuckets& buckets, std::span<const TrainedParameter> parameters,
                int ranks);

  /// The first micro-step of a window has ended.
  void count_twice(std::span<const TrainedParameter> parameters) const;

 private:
  torch::Tensor own_;                        // parameter 0's gradient before it was averaged
  std::map<size_t, torch::Tensor> earlier_;  // [bucket] its mean in the step before
};

}  // namespace lockstep
