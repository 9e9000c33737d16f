#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

#include "lockstep/memory.hpp"

// What needs CUDA's own headers, beyond libtorch's device-neutral streams and events. Only
// src/device calls it, and only in builds with CUDA.
namespace lockstep::cuda {

/// Charges every block that libtorch allocates for `stream` to `account`, until unwatched. Where
/// several accounts watch one stream, the latest is charged.
void watch_memory(c10::Stream stream, MemoryAccount& account);

/// Adds to `busy_ns` the time in which `stream` holds unfinished work, until unwatched.
void watch_busy(c10::Stream stream, std::atomic<int64_t>& busy_ns);

void unwatch_memory(c10::Stream stream, MemoryAccount& account);
void unwatch_busy(std::atomic<int64_t>& busy_ns);

int64_t capacity_bytes(int gpu);

/// An event that keeps the time at which `stream` reaches it.
std::shared_ptr<void> record_time(c10::Stream stream);

/// That time, in times of monotonic_ns(). Waits for it.
int64_t time_ns(const std::shared_ptr<void>& event);

}  // namespace lockstep::cuda
