#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/dtype.hpp"

namespace lockstep {

/// What the plan must know of a parameter.
struct ParameterSize {
  int64_t count = 0;  ///< elements
  Dtype dtype = Dtype::kF32;
  int device = 0;  ///< parameters of one bucket share dtype and device
};

struct BucketLimits {
  int64_t first_bytes = 0;  ///< a small first bucket starts the communication early
  int64_t cap_bytes = 0;    ///< of all later ones
};

/// Where a parameter's gradient lies in its bucket.
struct PlannedGradient {
  size_t parameter = 0;
  int64_t offset = 0;  ///< elements from the bucket's begin
};

struct PlannedBucket {
  std::vector<PlannedGradient> gradients;
  Dtype dtype = Dtype::kF32;
  int device = 0;
  int64_t count = 0;  ///< elements, with the gaps that align each gradient

  int64_t bytes() const { return count * dtype_bytes(dtype); }
};

/// Each gradient begins at a multiple of this many bytes. A gradient's room does not depend on its
/// neighbours, so that all plans of one model need the same memory.
inline constexpr int64_t kGradientAlignment = 64;

/// Elements a gradient takes, its gap included.
int64_t padded_count(int64_t count, Dtype dtype);

/// Divides parameters into buckets that are launched in this order. `order` is the expected order
/// of readiness, and names every parameter once. As in PyTorch a bucket takes parameters until its
/// size has reached the limit, so that it may overshoot; dtype and device are kept apart, each with
/// its own first bucket; buckets are ordered by when they can be complete.
std::vector<PlannedBucket> plan_buckets(std::span<const ParameterSize> parameters,
                                        std::span<const size_t> order, const BucketLimits& limits);

}  // namespace lockstep
