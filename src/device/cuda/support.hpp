#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

#include "lockstep/memory.hpp"

// What needs CUDA's own headers, beyond libtorch's device-neutral streams and events. Of builds
// with CUDA only.
namespace lockstep::cuda {

/// Charges every block that libtorch allocates for `stream` to `account`, until unwatched. Where
/// several accounts watch one stream, the latest is charged.
void watch_memory(c10::Stream stream, MemoryAccount& account);

/// Adds to `busy_ns` the time in which `stream` holds unfinished work, until unwatched.
void watch_busy(c10::Stream stream, std::atomic<int64_t>& busy_ns);

void unwatch_memory(c10::Stream stream, MemoryAccount& account);

/// The account that blocks for `stream` are charged to; null: none. For memory that does not come
/// from libtorch and must be charged by hand.
MemoryAccount* watching_account(c10::Stream stream);

void unwatch_busy(std::atomic<int64_t>& busy_ns);

/// Guard: no stream is looked at for busy time, as while one is captured.
class PauseSampling {
 public:
  PauseSampling();
  ~PauseSampling();
  PauseSampling(const PauseSampling&) = delete;
  PauseSampling& operator=(const PauseSampling&) = delete;
};

/// What OwnStream takes and gives back.
c10::Stream take_stream(int gpu);
void give_back_stream(c10::Stream stream);

int64_t capacity_bytes(int gpu);

}  // namespace lockstep::cuda
