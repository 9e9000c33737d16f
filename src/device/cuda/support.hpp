#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/memory.hpp"

// What needs CUDA's own headers, beyond libtorch's device-neutral streams and events. Only builds
// with CUDA have it.
namespace lockstep::cuda {

/// What OwnStream takes and gives back.
c10::Stream take_stream(int gpu);
void give_back_stream(c10::Stream stream);

int64_t capacity_bytes(int gpu);

/// Records an event that keeps the time at which `stream` reaches it. DeviceEvent is made of these.
std::shared_ptr<void> record_time(c10::Stream stream);

/// That time by monotonic_ns(). Waits for the event.
int64_t time_ns(const std::shared_ptr<void>& event);

/// The time between two events of one GPU, negative if the second came first. Waits for both.
int64_t ns_between(const std::shared_ptr<void>& first, const std::shared_ptr<void>& second);

bool is_reached(const std::shared_ptr<void>& event);

/// Adds to `busy_ns` the time in which `stream` has unfinished work, until unwatch_busy().
void watch_busy(c10::Stream stream, std::atomic<int64_t>& busy_ns);
void unwatch_busy(std::atomic<int64_t>& busy_ns);

/// Guard: busy time is not sampled, because a query would invalidate the capture of a stream.
class PauseSampling {
 public:
  PauseSampling();
  ~PauseSampling();
  PauseSampling(const PauseSampling&) = delete;
  PauseSampling& operator=(const PauseSampling&) = delete;
};

/// Charges every block that libtorch allocates for `stream` to `account`, until unwatch_memory().
/// If several accounts watch a stream, the latest is charged.
void watch_memory(c10::Stream stream, MemoryAccount& account);
void unwatch_memory(c10::Stream stream, MemoryAccount& account);

/// The account that blocks for `stream` are charged to, or null. For memory that does not come from
/// libtorch and must be charged explicitly.
MemoryAccount* watching_account(c10::Stream stream);

/// The memory of CUDA graphs that share a pool. What is allocated for the stream while they are
/// recorded stays charged as long as this lives, even after its tensor is gone, because every
/// replay uses it again.
class GraphMemory {
 public:
  explicit GraphMemory(c10::Stream stream);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  /// Guard: a graph is being recorded.
  class Recording {
   public:
    explicit Recording(GraphMemory& memory);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    GraphMemory& memory_;
  };

  /// Bytes held beyond those of tensors that still live.
  int64_t held_bytes() const;

  using Blocks = std::vector<std::pair<void*, int64_t>>;  ///< address, bytes
  /// Blocks of recordings whose tensors still live.
  Blocks live_blocks() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::cuda
