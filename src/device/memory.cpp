#include "lockstep/memory.hpp"

#include <deque>
#include <mutex>

namespace lockstep {

MemoryAccount& make_memory_account() {
  static std::mutex mutex;
  static auto* accounts = new std::deque<MemoryAccount>();
  const std::lock_guard lock(mutex);
  return accounts->emplace_back();
}

}  // namespace lockstep
