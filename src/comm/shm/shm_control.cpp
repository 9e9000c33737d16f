#include "comm/shm/shm_control.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

#include "comm/failure.hpp"

namespace lockstep {
namespace {

constexpr int64_t kHeaderBytes = 4096;

// Hands out consecutive ranges, each on its own page.
class Ranges {
 public:
  int64_t take(int64_t bytes) {
    const int64_t offset = end_;
    end_ = round_up(end_ + bytes, page_bytes());
    return offset;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

// Large enough that a pipeline's activations fit, small enough that a big group's pairs fit.
int64_t pipe_bytes_for(int64_t size) {
  const int64_t share = (int64_t{256} << 20) / (size * size);
  return std::clamp(share / page_bytes() * page_bytes(), int64_t{64} << 10, int64_t{1} << 20);
}

}  // namespace

ControlLayout::ControlLayout(int64_t size) : pipe_bytes(pipe_bytes_for(size)) {
  Ranges ranges;
  ranges.take(kHeaderBytes);
  abort = ranges.take(
      static_cast<int64_t>(sizeof(AbortSlot) + AbortRecord::max_bytes(static_cast<int>(size))));
  ranks = ranges.take(size * static_cast<int64_t>(sizeof(RankControl)));
  pipes = ranges.take(size * size * static_cast<int64_t>(sizeof(PipeControl)));
  ring = ranges.take(size * kRingCalls * static_cast<int64_t>(sizeof(RingEntry)));
  staging = ranges.take(size * kStagingSlots * kStagingBytes);
  pipe_data = ranges.take(size * size * pipe_bytes);
  end = ranges.end();
}

OwnedDescriptor ShmControl::make(int size) {
  const ControlLayout layout(size);
  auto file = make_memory_file("lockstep-control", layout.end);
  reserve_memory(file->get(), 0, layout.staging, "the ranks' control block");
  return file;
}

void ShmControl::reserve_pipe(int from, int to) const {
  reserve_memory(mapping_->file(), pipe_data(from, to) - mapping_->data(), pipe_bytes(),
                 "messages between two ranks");
}

void ShmControl::reserve_staging(int peer) const {
  reserve_memory(mapping_->file(), staging(peer, 0) - mapping_->data(),
                 kStagingSlots * kStagingBytes, "staging memory");
}

void ShmControl::wake() const {
  auto& sleepers = at<OwnLine<int32_t>>(kSleepersOffset).value;
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  auto& bell = at<OwnLine<uint32_t>>(kBellOffset).value;
  bell.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ShmControl::wait_on(std::atomic<uint32_t>& bell, uint32_t seen, int64_t nanoseconds) {
  const timespec timeout{.tv_sec = nanoseconds / 1'000'000'000,
                         .tv_nsec = nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace lockstep
