#pragma once

// Values in memory that processes share. They are read without a lock and never half written.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lockstep {

/// A value stored as atomic words, so that copying it in or out is never a data race.
template <class T>
struct AtomicWords {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  using Array = std::array<uint64_t, sizeof(T) / sizeof(uint64_t)>;

  std::array<std::atomic<uint64_t>, sizeof(T) / sizeof(uint64_t)> words;

  void store(const T& value) {
    Array plain;
    std::memcpy(plain.data(), &value, sizeof(T));
    for (size_t i = 0; i < plain.size(); ++i) words[i].store(plain[i], std::memory_order_release);
  }

  T load() const {
    Array plain;
    for (size_t i = 0; i < plain.size(); ++i) plain[i] = words[i].load(std::memory_order_acquire);
    T value;
    std::memcpy(static_cast<void*>(&value), plain.data(), sizeof(T));
    return value;
  }
};

/// A value that is read whole. Note [Cell]: version v is in copy v % 2. A writer fills the other
/// copy and then publishes v + 1, so that a writer that dies half-way leaves the previous value
/// intact, which a plain sequence lock would not. A reader that saw words of v + 2 in its copy also
/// sees a version past v, by acquire and release on the words, and reads again.
template <class T>
struct Cell {
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> claimed;
  std::array<AtomicWords<T>, 2> copies;

  /// If another thread is writing this cell, that write counts as the later one.
  void store(const T& value) {
    if (claimed.exchange(1, std::memory_order_acquire) != 0) return;
    const uint32_t next = version.load(std::memory_order_relaxed) + 1;
    copies[next % 2].store(value);
    version.store(next, std::memory_order_release);
    claimed.store(0, std::memory_order_release);
  }

  /// Unlocks a cell whose writer has died.
  void release() { claimed.store(0, std::memory_order_release); }

  /// All zeros before the first store.
  T load() const {
    for (;;) {
      const uint32_t before = version.load(std::memory_order_acquire);
      const T value = copies[before % 2].load();
      if (version.load(std::memory_order_relaxed) == before) return value;
    }
  }
};

}  // namespace lockstep
