#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "lockstep/memory.hpp"

namespace lockstep {

/// The CPU memory of one logical device: its account, and freed blocks kept for reuse.
///
/// Note [Which blocks are kept]
/// A training step asks for the same sizes again and again, and a large block fresh from the system
/// costs a page fault every 4 KiB. So large blocks wait here, by exact size, for the next request:
///  - A freed block is kept only where its size has come back before: a request found no kept block
///    although one of that size had gone back to the system. What is allocated once and freed, as
///    when a data set is prepared, goes back at once.
///  - Live and kept bytes together never exceed the most that was live lately.
///  - A block that nobody asked for during a whole period goes back. A period is kPeriod requests
///    for large blocks by the whole process, so that a device that rests is trimmed by the others.
///  - When the system has no memory left, all pools are emptied before a request fails.
class CpuPool {
 public:
  static constexpr size_t kSmallestKept = 32 * 1024;  ///< below this malloc itself is quick
  static constexpr uint64_t kPeriod = 16384;          ///< requests; many steps of most programs

  explicit CpuPool(MemoryAccount& account) : account_(account) {}
  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  /// A block of at least `bytes`, aligned to 64, charged to the account.
  void* take(size_t bytes);

  /// Frees or keeps a block that some pool's take() returned; any thread.
  static void give_back(void* data) noexcept;

  /// Returns the kept blocks to the system, and blocks freed later too: the device is gone.
  void retire() noexcept;

  const MemoryAccount& account() const { return account_; }
  MemoryAccount& account() { return account_; }

  /// Bytes of freed blocks that wait for the next request.
  size_t kept_bytes() const;

  /// The pool that a block from take() is charged to.
  static const CpuPool& pool_of(const void* data);

  /// A pool that lives as long as the process, for the same reason as its account does.
  static CpuPool& make(MemoryAccount& account);

 private:
  /// What is known of the blocks of one size. A block that was ever live is live, in `kept` or
  /// counted in `returned`.
  struct Size {
    std::vector<void*> kept;
    size_t returned = 0;     // blocks that went back to the system
    size_t recurring = 0;    // blocks that came back: at most so many are kept
    size_t fewest_kept = 0;  // in this period: so many nobody needed
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
  size_t live_large_bytes_ = 0;       // live blocks of a size that may be kept when freed
  size_t most_live_in_period_ = 0;    // of those bytes, in this period
  size_t most_live_large_bytes_ = 0;  // in this period and the one before
};

/// Makes lockstep's allocator the one libtorch uses for CPU tensors; the first call does it.
void install_cpu_allocator();

/// Charged with what threads outside any logical device ask for.
const MemoryAccount& host_account();

/// Charges this thread's CPU allocations to `pool` from now on (null: the host); returns the
/// previous.
CpuPool* exchange_current_pool(CpuPool* pool) noexcept;

}  // namespace lockstep
