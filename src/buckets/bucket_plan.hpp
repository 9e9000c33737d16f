#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.hpp"

namespace lockstep {

/// What the plan needs to know about a parameter.
struct ParameterSize {
  int64_t count = 0;  ///< elements
  Dtype dtype = Dtype::kF32;
  int device = 0;  ///< parameters of one bucket share dtype and device
};

struct BucketLimits {
  int64_t first_bytes = 0;  ///< of the first bucket: a small one starts communication early
  int64_t cap_bytes = 0;    ///< of all later buckets
};

/// The position of a parameter's gradient in its bucket.
struct PlannedGradient {
  size_t parameter = 0;
  int64_t offset = 0;  ///< in elements from the start of the bucket
};

struct PlannedBucket {
  std::vector<PlannedGradient> gradients;
  Dtype dtype = Dtype::kF32;
  int device = 0;
  int64_t count = 0;  ///< elements, including the gaps that align each gradient

  int64_t bytes() const { return count * dtype_bytes(dtype); }
};

/// Each gradient starts at a multiple of this many bytes. The space of a gradient does not depend
/// on its neighbours, so all plans of one model need the same memory.
inline constexpr int64_t kGradientAlignment = 64;

/// The elements that a gradient takes, including its gap.
int64_t padded_count(int64_t count, Dtype dtype);

/// Divides parameters into buckets, in launch order. `order` is the expected order of readiness and
/// names every parameter once. As in PyTorch, a bucket takes parameters until its size has reached
/// the limit, which it may overshoot. Dtypes and devices are kept apart, each with a first bucket
/// of its own, and buckets are ordered by when they can be complete.
std::vector<PlannedBucket> plan_buckets(std::span<const ParameterSize> parameters,
                                        std::span<const size_t> order, const BucketLimits& limits);

}  // namespace lockstep
