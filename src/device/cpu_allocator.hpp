#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "lockstep/memory.hpp"

namespace lockstep {

/// The CPU memory of one logical device: its account and the freed blocks it keeps for reuse.
///
/// Note [Which blocks are kept]
/// A training step requests the same sizes again and again, and a large block fresh from the system
/// costs a page fault every 4 KiB. So a pool keeps freed large blocks, by exact size, for the next
/// request:
///  - A freed block is kept only if its size recurs: an earlier request found no kept block
///  although
///    one of that size had been returned to the system. Blocks that are allocated once and freed,
///    as when a data set is prepared, are returned at once.
///  - Live and kept bytes together never exceed the recent maximum of live bytes.
///  - A block that was not requested during a whole period is returned. A period is kPeriod
///  requests
///    for large blocks by the whole process, so that idle devices are trimmed too.
///  - If the system has no memory left, all pools are emptied before a request fails.
class CpuPool {
 public:
  static constexpr size_t kSmallestKept = 32 * 1024;  ///< for smaller blocks malloc is fast enough
  static constexpr uint64_t kPeriod = 16384;          ///< requests: many steps of most programs

  explicit CpuPool(MemoryAccount& account) : account_(account) {}
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  /// Returns a block of at least `bytes`, aligned to 64 and charged to the account.
  void* take(size_t bytes);

  /// Frees or keeps a block from any pool's take(). Any thread may call it.
  static void give_back(void* data) noexcept;

  /// Returns the kept blocks, and all blocks freed later, to the system: the device is gone.
  void retire() noexcept;

  const MemoryAccount& account() const { return account_; }
  MemoryAccount& account() { return account_; }

  /// Bytes of freed blocks that are kept.
  size_t kept_bytes() const;

  /// The pool that a block from take() is charged to.
  static const CpuPool& pool_of(const void* data);

  /// Makes a pool that lives as long as the process, because a tensor may outlive its device.
  static CpuPool& make(MemoryAccount& account);

 private:
  /// The blocks of one size. A block that was ever live is live, in `kept` or counted in
  /// `returned`.
  struct Size {
    std::vector<void*> kept;
    size_t returned = 0;     // blocks that were returned to the system
    size_t recurring = 0;    // blocks that were requested again: the most that are kept
    size_t fewest_kept = 0;  // in this period: nobody needed these
    bool used = true;        // in this period
  };
  using Blocks = std::vector<void*>;

  void* take_kept(size_t bytes);
  bool keep(void* base, size_t bytes) noexcept;
  void make_room(Blocks& to_free);
  void drop_oldest(Size& size, size_t bytes, Blocks& to_free);
  void end_period() noexcept;
  void empty() noexcept;
  static void for_each_pool(void (CpuPool::*visit)() noexcept) noexcept;

  MemoryAccount& account_;
  mutable std::mutex mutex_;      // guards what follows
  std::map<size_t, Size> sizes_;  // [bytes]
  bool retired_ = false;
  size_t kept_bytes_ = 0;
  size_t live_large_bytes_ = 0;       // of blocks large enough to be kept
  size_t most_live_in_period_ = 0;    // of those bytes, in this period
  size_t most_live_large_bytes_ = 0;  // in this period and the one before
};

/// Makes libtorch use lockstep's allocator for CPU tensors. Only the first call has an effect.
void install_cpu_allocator();

/// The account of threads outside any logical device.
const MemoryAccount& host_account();

/// Charges this thread's CPU allocations to `pool` from now on, or to the host if it is null.
/// Returns the previous pool.
CpuPool* exchange_current_pool(CpuPool* pool) noexcept;

}  // namespace lockstep
