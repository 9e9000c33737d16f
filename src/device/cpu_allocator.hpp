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
/// A training step asks for the same sizes again and again, and a large block fresh from the system
/// costs a page fault every 4 KiB. So large blocks wait here, by exact size, for the next request.
/// Live and kept bytes together never exceed the most that was ever live.
class CpuPool {
 public:
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

  /// The pool that a block from take() is charged to.
  static const CpuPool& pool_of(const void* data);

  /// A pool that lives as long as the process, for the same reason as its account does.
  static CpuPool& make(MemoryAccount& account);

 private:
  void* take_kept(size_t bytes);
  void free_kept() noexcept;
  bool keep(void* base, size_t bytes) noexcept;

  MemoryAccount& account_;
  std::mutex mutex_;                           // guards what follows
  std::map<size_t, std::vector<void*>> kept_;  // [bytes] -> blocks
  bool retired_ = false;
  size_t kept_bytes_ = 0;
  size_t live_large_bytes_ = 0;  // live blocks of a size that is kept when freed
  size_t most_live_large_bytes_ = 0;
};

/// Makes lockstep's allocator the one libtorch uses for CPU tensors; the first call does it.
void install_cpu_allocator();

/// Charged with what threads outside any logical device ask for.
const MemoryAccount& host_account();

/// Charges this thread's CPU allocations to `pool` from now on (null: the host); returns the
/// previous.
CpuPool* exchange_current_pool(CpuPool* pool) noexcept;

}  // namespace lockstep
