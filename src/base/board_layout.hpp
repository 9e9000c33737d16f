#pragma once

// The bytes of a board file. Processes of different builds may meet here: whoever changes a struct
// raises kLayoutVersion.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "lockstep/board.hpp"

namespace lockstep::board_layout {

inline constexpr uint64_t kMagic = 0x0064'7261'6f42'534c;  // "LSBoard" in the file
inline constexpr uint32_t kLayoutVersion = 3;

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<double>::is_always_lock_free);

/// A short text of fixed size, cut between UTF-8 characters.
template <size_t Bytes>
struct Text {
  std::array<char, Bytes> characters;  // ends with NUL

  static Text of(std::string_view source) {
    size_t length = std::min(source.size(), Bytes - 1);
    const auto continues = [&](size_t i) {
      return (static_cast<unsigned char>(source[i]) & 0xC0) == 0x80;
    };
    while (length > 0 && length < source.size() && continues(length)) --length;
    Text text{};
    std::memcpy(text.characters.data(), source.data(), length);
    return text;
  }

  std::string str() const {
    const auto end = std::find(characters.begin(), characters.end(), '\0');
    return std::string(characters.begin(), end);
  }
};

/// A value as atomic words, so that copying it in or out is never a data race.
template <class T>
struct Words {
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
    std::memcpy(&value, plain.data(), sizeof(T));
    return value;
  }
};

/// A value that is read whole or not at all. Note [Cell]: version v lies in copy v % 2. A writer
/// fills the other copy and then publishes v + 1, so a writer that dies half-way leaves the value
/// before it intact, which a plain sequence lock would not. A reader that met words of v + 2 in its
/// copy sees, by acquire and release on the words, a version past v, and reads again.
template <class T>
struct Cell {
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> claimed;
  std::array<Words<T>, 2> copies;

  /// Where another thread is writing this cell, that write counts as the later one.
  void store(const T& value) {
    if (claimed.exchange(1, std::memory_order_acquire) != 0) return;
    const uint32_t next = version.load(std::memory_order_relaxed) + 1;
    copies[next % 2].store(value);
    version.store(next, std::memory_order_release);
    claimed.store(0, std::memory_order_release);
  }

  /// Frees a cell whose writing process has died.
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

struct DeviceIdentity {
  Text<32> name;
  Text<64> physical;
  int64_t capacity_bytes;
};

struct DevicePage {
  Cell<DeviceIdentity> identity;
  std::atomic<int64_t> live_bytes;
  std::atomic<int64_t> peak_bytes;
  std::atomic<int64_t> busy_ns;
};

struct CollectiveStart {
  int64_t sequence;
  Text<24> operation;
  int64_t bytes;
  int64_t bucket;
  int64_t started_ns;
};

struct CollectiveFinish {
  int64_t sequence;
  int64_t finished_ns;
};

struct ErrorText {
  int64_t code;
  int64_t at_ns;
  int64_t blamed_rank;
  Text<496> message;
};

enum class ErrorState : uint32_t { kNone, kWriting, kComplete };

struct RankPage {
  std::atomic<int64_t> pid;
  std::atomic<int64_t> started_ns;
  std::atomic<int64_t> updated_ns;
  std::atomic<int64_t> step;
  std::atomic<double> loss;
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> error_state;
  std::array<std::atomic<int64_t>, 3> clocks_ns;  // [Activity]
  Cell<Text<64>> program;
  Cell<CollectiveStart> collective_start;
  Cell<CollectiveFinish> collective_finish;
  Words<ErrorText> error;
  std::atomic<int64_t> device_count;  // highest index named, plus one
  std::array<DevicePage, kBoardDevices> devices;
};

/// Written once by the maker; `magic` last.
struct Header {
  std::atomic<uint64_t> magic;
  uint32_t layout_version;
  uint32_t ranks;
  uint64_t page_bytes;
  int64_t launcher_pid;
  int64_t launcher_start_ticks;  // tells the launcher from a later process with its pid
  uint64_t pid_namespace;        // where launcher_pid means something
  int64_t started_ns;
  Text<64> run_name;
};

inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kPageBytes = (static_cast<int64_t>(sizeof(RankPage)) + 4095) / 4096 * 4096;

static_assert(sizeof(Header) == 120 && sizeof(Header) <= kHeaderBytes);
static_assert(sizeof(DevicePage) == 240 && sizeof(Words<ErrorText>) == 520);
static_assert(sizeof(RankPage) == 62'336, "the layout changed: raise kLayoutVersion");
static_assert(std::is_standard_layout_v<RankPage> && std::is_standard_layout_v<Header>);
static_assert(std::is_trivially_destructible_v<RankPage> &&
              std::is_trivially_destructible_v<Header>);

}  // namespace lockstep::board_layout
