#pragma once

#include <memory>

#include "lockstep/distributed_data_parallel.hpp"

namespace lockstep {

/// What happens to a bucket where the user gave no hook: the ranks' weighted mean, in place.
std::unique_ptr<BucketWork> begin_mean(const Communicator& comm, const GradientBucket& bucket,
                                       double weight);

}  // namespace lockstep
