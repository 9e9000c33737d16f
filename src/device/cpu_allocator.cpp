#include "device/cpu_allocator.hpp"

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <new>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

constexpr size_t kAlignment = 64;

// Precedes every block and takes one alignment unit.
struct BlockHeader {
  CpuPool* pool;
  size_t bytes;
};
static_assert(sizeof(BlockHeader) <= kAlignment);

BlockHeader* header_of(const void* data) {
  return reinterpret_cast<BlockHeader*>(static_cast<std::byte*>(const_cast<void*>(data)) -
                                        kAlignment);
}

// Returns null if there is no memory left.
void* allocate_from_system(size_t bytes) {
  void* base = nullptr;
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  return posix_memalign(&base, kAlignment, bytes + kAlignment) == 0 ? base : nullptr;
}

// All pools of the process. They are never destroyed.
struct Pools {
  std::mutex mutex;
  std::deque<CpuPool> all;
};

Pools& pools() {
  static auto* made = new Pools();
  return *made;
}

CpuPool& host_pool() {
  static CpuPool& pool = CpuPool::make(make_memory_account());
  return pool;
}

thread_local CpuPool* current_pool = nullptr;

void free_block(void* data) {
  CpuPool::give_back(data);
}

class PooledCpuAllocator final : public compat::CpuAllocatorBase {
 public:
  c10::DataPtr allocate_block(size_t bytes) const override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, at::kCPU};
    CpuPool& pool = current_pool != nullptr ? *current_pool : host_pool();
    void* data = pool.take(bytes);
    return {data, data, &free_block, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
};

}  // namespace

CpuPool& CpuPool::make(MemoryAccount& account) {
  const std::lock_guard lock(pools().mutex);
  return pools().all.emplace_back(account);
}

void CpuPool::for_each_pool(void (CpuPool::*visit)() noexcept) noexcept {
  const std::lock_guard lock(pools().mutex);
  for (auto& pool : pools().all) (pool.*visit)();
}

void MemoryAccount::refuse(int64_t bytes) const {
  throw Error(
      Code::kOutOfMemory,
      fmt::format("{} of memory are needed, and of the logical device's {} only {} are free",
                  format_bytes(bytes), format_bytes(limit()),
                  format_bytes(std::max<int64_t>(0, limit() - usage().live_bytes))),
      "use smaller batches or a smaller model, divide the model with "
      "FullyShardedDataParallel, or raise Device::set_memory_limit()");
}

void* CpuPool::take(size_t bytes) {
  account_.require(static_cast<int64_t>(bytes));
  const bool large = bytes >= kSmallestKept;
  void* base = large ? take_kept(bytes) : nullptr;
  if (base == nullptr) base = allocate_from_system(bytes);
  if (base == nullptr) {
    for_each_pool(&CpuPool::empty);
    malloc_trim(0);  // returns what malloc itself kept of smaller blocks
    base = allocate_from_system(bytes);
  }
  if (base == nullptr) {
    const std::lock_guard lock(mutex_);
    if (large) live_large_bytes_ -= bytes;
    throw Error(Code::kOutOfMemory,
                fmt::format("the system did not give {} of memory",
                            format_bytes(static_cast<int64_t>(bytes))),
                "use smaller batches, a smaller model or fewer logical devices");
  }
  new (base) BlockHeader{this, bytes};
  account_.charge(static_cast<int64_t>(bytes));
  return static_cast<std::byte*>(base) + kAlignment;
}

void* CpuPool::take_kept(size_t bytes) {
  static std::atomic<uint64_t> requests{0};
  if (requests.fetch_add(1, std::memory_order_relaxed) % kPeriod == kPeriod - 1) {
    for_each_pool(&CpuPool::end_period);
  }
  Blocks to_free;
  void* base = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Size& size = sizes_[bytes];
    size.used = true;
    if (!size.kept.empty()) {
      base = size.kept.back();
      size.kept.pop_back();
      size.fewest_kept = std::min(size.fewest_kept, size.kept.size());
      kept_bytes_ -= bytes;
    } else if (size.returned > 0) {
      --size.returned;
      ++size.recurring;
    }
    live_large_bytes_ += bytes;
    most_live_in_period_ = std::max(most_live_in_period_, live_large_bytes_);
    most_live_large_bytes_ = std::max(most_live_large_bytes_, live_large_bytes_);
    make_room(to_free);
  }
  for (void* block : to_free) std::free(block);
  return base;
}

bool CpuPool::keep(void* base, size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  live_large_bytes_ -= bytes;
  if (retired_ || !compat::kReuseCpuBlocks) return false;
  try {
    Size& size = sizes_[bytes];
    size.used = true;
    const bool recurs = size.kept.size() < size.recurring;
    const bool fits = live_large_bytes_ + kept_bytes_ + bytes <= most_live_large_bytes_;
    if (!recurs || !fits) {
      ++size.returned;
      if (recurs) --size.recurring;
      return false;
    }
    size.kept.push_back(base);
  } catch (const std::bad_alloc&) {
    return false;
  }
  kept_bytes_ += bytes;
  return true;
}

void CpuPool::give_back(void* data) noexcept {
  if (data == nullptr) return;
  BlockHeader* header = header_of(data);
  CpuPool& pool = *header->pool;
  const size_t bytes = header->bytes;
  pool.account_.release(static_cast<int64_t>(bytes));
  if (bytes < kSmallestKept || !pool.keep(header, bytes)) std::free(header);
}

// Drops the largest kept blocks until live and kept bytes are within the limit. The caller holds
// the mutex.
void CpuPool::make_room(Blocks& to_free) {
  for (auto size = sizes_.rbegin(); size != sizes_.rend(); ++size) {
    while (!size->second.kept.empty()) {
      if (live_large_bytes_ + kept_bytes_ <= most_live_large_bytes_) return;
      drop_oldest(size->second, size->first, to_free);
    }
    if (kept_bytes_ == 0) return;
  }
}

// The caller holds the mutex.
void CpuPool::drop_oldest(Size& size, size_t bytes, Blocks& to_free) {
  to_free.push_back(size.kept.front());
  size.kept.erase(size.kept.begin());
  size.fewest_kept = std::min(size.fewest_kept, size.kept.size());
  kept_bytes_ -= bytes;
  ++size.returned;
  --size.recurring;
}

void CpuPool::end_period() noexcept {
  Blocks to_free;
  {
    const std::lock_guard lock(mutex_);
    try {
      for (auto entry = sizes_.begin(); entry != sizes_.end();) {
        auto& [bytes, size] = *entry;
        for (size_t unused = size.fewest_kept; unused > 0; --unused) {
          drop_oldest(size, bytes, to_free);
        }
        size.fewest_kept = size.kept.size();
        const bool forget = !std::exchange(size.used, false) && size.kept.empty();
        entry = forget ? sizes_.erase(entry) : std::next(entry);
      }
      most_live_large_bytes_ = most_live_in_period_;
      most_live_in_period_ = live_large_bytes_;
      make_room(to_free);
    } catch (const std::bad_alloc&) {  // the rest follows in the next period
    }
  }
  for (void* block : to_free) std::free(block);
}

void CpuPool::empty() noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [bytes, size] : sizes_) {
    for (void* block : size.kept) std::free(block);
  }
  sizes_.clear();
  kept_bytes_ = 0;
}

void CpuPool::retire() noexcept {
  {
    const std::lock_guard lock(mutex_);
    retired_ = true;
  }
  empty();
}

size_t CpuPool::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

const CpuPool& CpuPool::pool_of(const void* data) {
  return *header_of(data)->pool;
}

// Created when the program starts: other threads that allocate find it by a pointer of libtorch's
// that has no lock.
static PooledCpuAllocator& pooled_cpu_allocator() {
  static auto* allocator = new PooledCpuAllocator;
  return *allocator;
}
[[maybe_unused]] static const PooledCpuAllocator& created_at_start = pooled_cpu_allocator();

void install_cpu_allocator() {
  // Above the priority of libtorch's own allocators (0).
  static const bool installed = (c10::SetCPUAllocator(&pooled_cpu_allocator(), 100), true);
  (void)installed;
}

CpuPool* exchange_current_pool(CpuPool* pool) noexcept {
  return std::exchange(current_pool, pool);
}

ChargeHost::ChargeHost() : pool_before_(exchange_current_pool(nullptr)) {}

ChargeHost::~ChargeHost() {
  exchange_current_pool(pool_before_);
}

MemoryAccount& current_memory_account() {
  return (current_pool != nullptr ? *current_pool : host_pool()).account();
}

const MemoryAccount* account_of(const torch::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || !tensor.has_storage()) return nullptr;
  const auto& pointer = tensor.storage().data_ptr();
  if (pointer.get() == nullptr || pointer.get_deleter() != &free_block) return nullptr;
  return &CpuPool::pool_of(pointer.get()).account();
}

const MemoryAccount& host_account() {
  return host_pool().account();
}

MemoryUsage host_memory() {
  return host_account().usage();
}

MemoryAccount& make_memory_account() {
  static std::mutex mutex;
  static auto* accounts = new std::deque<MemoryAccount>();
  const std::lock_guard lock(mutex);
  return accounts->emplace_back();
}

}  // namespace lockstep
