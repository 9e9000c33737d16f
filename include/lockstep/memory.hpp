#pragma once

#include <torch/types.h>

#include <atomic>
#include <cstdint>

namespace lockstep {

class CpuPool;

/// Bytes as requested, without the allocator's rounding and the blocks it keeps for reuse.
struct MemoryUsage {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;  ///< maximum of live bytes since the start or the last reset
};

/// The memory of one logical device. Any thread may charge or release. A block is released to the
/// account that it was charged to, whichever thread frees it.
class MemoryAccount {
 public:
  void charge(int64_t bytes) noexcept {
    const int64_t live = live_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_bytes_.load(std::memory_order_relaxed);
    while (live > peak &&
           !peak_bytes_.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
    }
  }

  void release(int64_t bytes) noexcept { live_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

  MemoryUsage usage() const noexcept {
    return {live_bytes_.load(std::memory_order_relaxed),
            peak_bytes_.load(std::memory_order_relaxed)};
  }

  /// Sets the most bytes that may be live; 0: no limit.
  void set_limit(int64_t bytes) noexcept { limit_bytes_.store(bytes, std::memory_order_relaxed); }
  int64_t limit() const noexcept { return limit_bytes_.load(std::memory_order_relaxed); }

  /// Throws kOutOfMemory, which names need and have, if this many more bytes exceed the limit.
  void require(int64_t bytes) const {
    const int64_t limit_bytes = limit();
    if (limit_bytes > 0 && usage().live_bytes + bytes > limit_bytes) refuse(bytes);
  }

  /// Starts a new phase: sets the peak to the bytes that are live now.
  void reset_peak() noexcept {
    peak_bytes_.store(live_bytes_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    charge(0);  // counts what another thread charged in between
  }

 private:
  [[noreturn]] void refuse(int64_t bytes) const;

  std::atomic<int64_t> live_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0};
  std::atomic<int64_t> limit_bytes_{0};
};

/// Makes an account that lives as long as the process, because a tensor may outlive its device.
MemoryAccount& make_memory_account();

/// The account that this thread's CPU allocations are charged to: its logical device's or the
/// host's. For memory that comes from elsewhere and must be charged explicitly.
MemoryAccount& current_memory_account();

/// Guard: charges this thread's CPU allocations to the host instead of its logical device, for
/// example those of a data loader.
class ChargeHost {
 public:
  ChargeHost();
  ~ChargeHost();
  ChargeHost(const ChargeHost&) = delete;
  ChargeHost& operator=(const ChargeHost&) = delete;

 private:
  CpuPool* pool_before_;
};

/// The account that a CPU tensor's memory is charged to; null if lockstep did not allocate it.
const MemoryAccount* account_of(const torch::Tensor& tensor);

/// CPU memory that threads allocated outside any logical device.
MemoryUsage host_memory();

}  // namespace lockstep
