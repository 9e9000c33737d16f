#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/cell.hpp"
#include "comm/fingerprint.hpp"
#include "comm/shm/shm_memory.hpp"

// What the ranks of a group share, apart from the memory of allocate(). Note [Shared counters]
//
// The control block is one memory file. It starts as zeros, which is every field's initial value.
// Each counter has one writer, its rank, and only grows; a rank waits for a value by looking at it.
// What a counter announces was written before it, so: data, then counter (sequentially consistent,
// which orders it before the look for sleepers), and the reader the other way round.
//
//   arrived   the last collective whose fingerprint lies in this rank's ring
//   finished  the last collective this rank is done with: it reads nothing of it any more
//   staged    chunks this rank has put into its staging slots
//   consumed  chunks this rank has taken from all slots
//   waiting   the call this rank waits in; a rank that gives up uses it to build the wait graph
//
// Chunks are counted over all collectives, by the same rule on every rank, so that the numbers need
// no reset.

namespace lockstep {

inline constexpr int kRingCalls = 64;                // collectives in flight
inline constexpr int64_t kInlineBytes = 4096;        // data that travels with its fingerprint
inline constexpr int kStagingSlots = 4;              // per rank
inline constexpr int64_t kStagingBytes = 256 << 10;  // of a slot
inline constexpr int kShmRanks = 250;                // descriptors of one message, less a few

template <class T>
struct alignas(64) OwnLine {
  std::atomic<T> value;
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

/// Where the first rank that gives up says why: an encoded AbortRecord follows the slot.
struct AbortSlot {
  enum State : uint32_t { kNone, kWriting, kComplete };
  std::atomic<uint32_t> state;
  uint32_t bytes;

  char* data() { return reinterpret_cast<char*>(this + 1); }
};

/// A call in which a rank waits.
struct WaitingCall {
  int64_t waits;  // 0: in none
  int64_t peer;   // of a message: the group rank of its other side; -1: a collective
  Fingerprint call;
};

struct RankControl {
  OwnLine<int64_t> arrived;
  OwnLine<int64_t> finished;
  OwnLine<int64_t> staged;
  OwnLine<int64_t> consumed;
  OwnLine<int64_t> reducing;  // the collective of which it reduces a slice now; 0: none
  OwnLine<uint32_t> left;     // 1: destroyed its communicator
  alignas(64) Cell<WaitingCall> waiting;
};

/// One rank's part in one collective.
struct RingEntry {
  Fingerprint call;
  int64_t segment;           // where its data can be reached: the segment's number, or 0
  int64_t offset;            // into the segment
  OwnLine<int64_t> claimed;  // slices of this rank's region that somebody works on or has done
  OwnLine<int64_t> done;     // slices done, of all regions; rank 0's counts
  alignas(64) std::byte payload[kInlineBytes];
};

/// A stream of bytes from one rank to another.
struct PipeControl {
  OwnLine<int64_t> written;
  OwnLine<int64_t> read;
};

/// Where the parts of a group's control block begin.
struct ControlLayout {
  explicit ControlLayout(int64_t size);

  int64_t abort;
  int64_t ranks;
  int64_t pipes;
  int64_t ring;
  int64_t staging;  // from here on sparse
  int64_t pipe_data;
  int64_t pipe_bytes;  // of one pipe
  int64_t end;
};

/// A group's control block, as one rank sees it.
class ShmControl {
 public:
  ShmControl(std::shared_ptr<Mapping> mapping, int size)
      : mapping_(std::move(mapping)), size_(size), layout_(size) {}

  static OwnedDescriptor make(int size);

  int size() const { return size_; }
  AbortSlot& abort_slot() const { return at<AbortSlot>(layout_.abort); }
  RankControl& rank(int peer) const {
    return at<RankControl>(layout_.ranks + peer * static_cast<int64_t>(sizeof(RankControl)));
  }
  RingEntry& ring_entry(int peer, int64_t sequence) const {
    return at<RingEntry>(layout_.ring + (peer * kRingCalls + sequence % kRingCalls) *
                                            static_cast<int64_t>(sizeof(RingEntry)));
  }
  PipeControl& pipe(int from, int to) const {
    return at<PipeControl>(layout_.pipes +
                           (from * size_ + to) * static_cast<int64_t>(sizeof(PipeControl)));
  }
  /// The number of segments of which no rank holds a handle any more.
  std::atomic<int64_t>& dropped_segments() const {
    return at<OwnLine<int64_t>>(kDroppedOffset).value;
  }

  int64_t pipe_bytes() const { return layout_.pipe_bytes; }
  std::byte* pipe_data(int from, int to) const {
    return mapping_->data() + layout_.pipe_data + (from * size_ + to) * layout_.pipe_bytes;
  }
  std::byte* staging(int peer, int64_t chunk) const {
    return mapping_->data() + layout_.staging +
           (peer * kStagingSlots + chunk % kStagingSlots) * kStagingBytes;
  }

  /// Sparse parts must be reserved by their writer before the first use.
  void reserve_pipe(int from, int to) const;
  void reserve_staging(int peer) const;

  /// Publishes a counter and wakes the ranks that sleep.
  template <class T>
  void announce(OwnLine<T>& counter, T value) const {
    counter.value.store(value, std::memory_order_seq_cst);
    wake();
  }
  /// Wakes every rank that sleeps.
  void wake() const;

  /// Sleeps until woken or until the time is over. Looks at `ready` after saying that it sleeps, so
  /// that no announcement falls between; returns at once if it is true.
  template <class Ready>
  bool sleep(int64_t nanoseconds, Ready&& ready) const {
    auto& bell = at<OwnLine<uint32_t>>(kBellOffset).value;
    auto& sleepers = at<OwnLine<int32_t>>(kSleepersOffset).value;
    const uint32_t seen = bell.load(std::memory_order_seq_cst);
    const Asleep asleep(sleepers);
    if (ready()) return true;
    wait_on(bell, seen, nanoseconds);
    return false;
  }

 private:
  static constexpr int64_t kBellOffset = 0;
  static constexpr int64_t kSleepersOffset = 64;
  static constexpr int64_t kDroppedOffset = 128;

  struct Asleep {
    explicit Asleep(std::atomic<int32_t>& count) : sleepers(count) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Asleep() { sleepers.fetch_sub(1, std::memory_order_seq_cst); }
    Asleep(const Asleep&) = delete;
    Asleep& operator=(const Asleep&) = delete;
    std::atomic<int32_t>& sleepers;
  };

  static void wait_on(std::atomic<uint32_t>& bell, uint32_t seen, int64_t nanoseconds);

  template <class T>
  T& at(int64_t offset) const {
    return *reinterpret_cast<T*>(mapping_->data() + offset);
  }

  std::shared_ptr<Mapping> mapping_;
  int size_;
  ControlLayout layout_;
};

}  // namespace lockstep
