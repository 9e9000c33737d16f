#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

// Times of a GPU's streams: what Moment is made of. Of builds with CUDA only.
namespace lockstep::cuda {

/// An event that keeps the time at which `stream` reaches it.
std::shared_ptr<void> record_time(c10::Stream stream);

/// That time, in times of monotonic_ns(). Waits for it.
int64_t time_ns(const std::shared_ptr<void>& event);

/// The time between two events of one GPU, below 0 where the second came first. Waits for them.
int64_t ns_between(const std::shared_ptr<void>& first, const std::shared_ptr<void>& second);

bool is_reached(const std::shared_ptr<void>& event);

}  // namespace lockstep::cuda
