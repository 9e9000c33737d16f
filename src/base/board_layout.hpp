#pragma once

// The bytes of a board file. Processes of different builds may share one, so every change to a
// struct or to the numbers of Phase must raise kBoardLayoutVersion.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/cell.hpp"
#include "lockstep/detail/board.hpp"

namespace lockstep {

inline constexpr uint64_t kBoardMagic = 0x0064'7261'6f42'534c;  // "LSBoard" in the file
inline constexpr uint32_t kBoardLayoutVersion = 6;

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<double>::is_always_lock_free);

/// A text of fixed size. A longer one is cut between UTF-8 characters.
template <size_t Bytes>
struct BoardText {
  std::array<char, Bytes> characters;  // ends with NUL

  static BoardText of(std::string_view source) {
    size_t length = std::min(source.size(), Bytes - 1);
    const auto continues = [&](size_t i) {
      return (static_cast<unsigned char>(source[i]) & 0xC0) == 0x80;
    };
    while (length > 0 && length < source.size() && continues(length)) --length;
    BoardText text{};
    std::memcpy(text.characters.data(), source.data(), length);
    return text;
  }

  std::string str() const {
    const auto end = std::find(characters.begin(), characters.end(), '\0');
    return std::string(characters.begin(), end);
  }
};

struct DeviceIdentity {
  BoardText<32> name;
  BoardText<64> physical;
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
  BoardText<24> operation;
  int64_t bytes;
  int64_t bucket;
  int64_t started_ns;
};

struct CollectiveFinish {
  int64_t sequence;
  int64_t finished_ns;
};

struct PastCollective {
  Cell<CollectiveStart> start;
  Cell<CollectiveFinish> finish;
};

struct ErrorText {
  int64_t code;
  int64_t at_ns;
  int64_t blamed_rank;
  BoardText<496> message;
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
  Cell<BoardText<64>> program;
  Cell<CollectiveStart> collective_start;
  Cell<CollectiveFinish> collective_finish;
  std::array<PastCollective, kBoardCollectives> past;  // [sequence % kBoardCollectives]
  AtomicWords<ErrorText> error;
  std::atomic<int64_t> device_count;  // the highest index that was named, plus one
  std::array<DevicePage, kBoardDevices> devices;
  Cell<BoardText<128>> versions;
};

/// Written once by the process that creates the board; `magic` is stored last.
struct BoardHeader {
  std::atomic<uint64_t> magic;
  uint32_t layout_version;
  uint32_t ranks;
  uint64_t page_bytes;
  int64_t launcher_pid;
  int64_t launcher_start_ticks;  // tells the launcher from a later process with the same pid
  uint64_t pid_namespace;        // in which launcher_pid is valid
  int64_t started_ns;
  BoardText<64> run_name;
};

inline constexpr int64_t kBoardHeaderBytes = 4096;
inline constexpr int64_t kBoardPageBytes =
    (static_cast<int64_t>(sizeof(RankPage)) + 4095) / 4096 * 4096;

static_assert(sizeof(BoardHeader) == 120 && sizeof(BoardHeader) <= kBoardHeaderBytes);
static_assert(sizeof(DevicePage) == 240 && sizeof(AtomicWords<ErrorText>) == 520);
static_assert(sizeof(RankPage) == 65'160, "the layout changed: raise kBoardLayoutVersion");
static_assert(std::is_standard_layout_v<RankPage> && std::is_standard_layout_v<BoardHeader>);
static_assert(std::is_trivially_destructible_v<RankPage> &&
              std::is_trivially_destructible_v<BoardHeader>);

}  // namespace lockstep
