#include "device/cpu_allocator.hpp"

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <new>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "torch_compat.hpp"

namespace lockstep {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallestKept = 32 * 1024;  // below this malloc itself is quick

// Stands in front of every block, one alignment unit wide.
struct Header {
  CpuPool* pool;
  size_t bytes;
};
static_assert(sizeof(Header) <= kAlignment);

Header* header_of(const void* data) {
  return reinterpret_cast<Header*>(static_cast<std::byte*>(const_cast<void*>(data)) - kAlignment);
}

// Null where there is no memory left.
void* allocate_from_system(size_t bytes) {
  void* base = nullptr;
  if (bytes > SIZE_MAX - kAlignment) return nullptr;
  return posix_memalign(&base, kAlignment, bytes + kAlignment) == 0 ? base : nullptr;
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
  static std::mutex mutex;
  static auto* pools = new std::deque<CpuPool>();
  const std::lock_guard lock(mutex);
  return pools->emplace_back(account);
}

void* CpuPool::take(size_t bytes) {
  const bool large = bytes >= kSmallestKept;
  void* base = large ? take_kept(bytes) : nullptr;
  if (base == nullptr) base = allocate_from_system(bytes);
  if (base == nullptr) {
    const std::lock_guard lock(mutex_);
    free_kept();
    base = allocate_from_system(bytes);
    if (base == nullptr && large) live_large_bytes_ -= bytes;
  }
  if (base == nullptr) {
    throw Error(Code::kOutOfMemory,
                fmt::format("the system did not give {} of memory",
                            format_bytes(static_cast<int64_t>(bytes))),
                "use smaller batches, a smaller model or fewer logical devices");
  }
  new (base) Header{this, bytes};
  account_.charge(static_cast<int64_t>(bytes));
  return static_cast<std::byte*>(base) + kAlignment;
}

// Also makes room: what is kept in other sizes goes back to the system when it would push live and
// kept bytes past the mark.
void* CpuPool::take_kept(size_t bytes) {
  std::vector<void*> too_much;
  void* base = nullptr;
  {
    const std::lock_guard lock(mutex_);
    live_large_bytes_ += bytes;
    most_live_large_bytes_ = std::max(most_live_large_bytes_, live_large_bytes_);
    const auto found = kept_.find(bytes);
    if (found != kept_.end()) {
      base = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) kept_.erase(found);
      kept_bytes_ -= bytes;
    }
    while (kept_bytes_ > 0 && live_large_bytes_ + kept_bytes_ > most_live_large_bytes_) {
      const auto largest = std::prev(kept_.end());
      too_much.push_back(largest->second.back());
      kept_bytes_ -= largest->first;
      largest->second.pop_back();
      if (largest->second.empty()) kept_.erase(largest);
    }
  }
  for (void* block : too_much) std::free(block);
  return base;
}

bool CpuPool::keep(void* base, size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  live_large_bytes_ -= bytes;
  if (retired_ || !compat::kReuseCpuBlocks ||
      live_large_bytes_ + kept_bytes_ + bytes > most_live_large_bytes_)
    return false;
  try {
    kept_[bytes].push_back(base);
  } catch (const std::bad_alloc&) {
    return false;
  }
  kept_bytes_ += bytes;
  return true;
}

void CpuPool::give_back(void* data) noexcept {
  if (data == nullptr) return;
  Header* header = header_of(data);
  CpuPool& pool = *header->pool;
  const size_t bytes = header->bytes;
  pool.account_.release(static_cast<int64_t>(bytes));
  if (bytes < kSmallestKept || !pool.keep(header, bytes)) std::free(header);
}

// The caller holds the mutex.
void CpuPool::free_kept() noexcept {
  for (auto& [bytes, blocks] : kept_) {
    for (void* block : blocks) std::free(block);
  }
  kept_.clear();
  kept_bytes_ = 0;
}

void CpuPool::retire() noexcept {
  const std::lock_guard lock(mutex_);
  retired_ = true;
  free_kept();
}

const CpuPool& CpuPool::pool_of(const void* data) {
  return *header_of(data)->pool;
}

void install_cpu_allocator() {
  static PooledCpuAllocator* allocator = [] {
    auto* created = new PooledCpuAllocator();
    // Above libtorch's own allocators (priority 0).
    c10::SetCPUAllocator(created, 100);
    return created;
  }();
  (void)allocator;
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

}  // namespace lockstep
