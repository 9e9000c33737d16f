#pragma once

#include <span>

#include "parallel/gradient_buckets.hpp"

namespace lockstep::cuda {

/// Autograd adds a gradient up on the stream that was current when its parameter's accumulator was
/// made, and hooks keep accumulators for ever. From now on these do it on the calling thread's
/// current stream: where forward runs, and what a capture records.
void accumulate_on_current_stream(std::span<const TrainedParameter> parameters);

}  // namespace lockstep::cuda
