#include "comm/shm/shm_engine.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int kSpins = 1000;  // some 20 microseconds
constexpr int kYields = 40;
constexpr int64_t kNapNs = 2'000'000;  // where nobody wakes a sleeper, it looks this often
constexpr int64_t kProcessCheckNs = 10'000'000;  // a peer's death is seen within this

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The use that peers still make of an old call's ring entries.
class EntryUse final : public ShmTask {
 public:
  EntryUse(const ShmEngine& engine, const ShmTask& next, int64_t old_sequence)
      : ShmTask(next.call, {.deadline_ns = next.deadline_ns, .label = next.call.label}),
        engine_(engine),
        old_sequence_(old_sequence) {}

  bool step() override { return engine_.all_reached(&RankControl::finished, old_sequence_); }
  std::vector<int> awaited() const override {
    return engine_.behind(&RankControl::finished, old_sequence_);
  }

 private:
  const ShmEngine& engine_;
  int64_t old_sequence_;
};

}  // namespace

ShmTask::ShmTask(const Call& what, const CallContext& context)
    : call(what), begun_ns(running_ns()), deadline_ns(context.deadline_ns) {
  call.set_label(context.label);
}

bool ShmCollective::step() {
  if (state_ == State::kArriving) {
    if (!engine_.all_reached(&RankControl::arrived, call.sequence)) return false;
    engine_.compare(call);
    arrived();
    state_ = State::kMoving;
  }
  return move();
}

std::vector<int> ShmCollective::awaited() const {
  if (state_ == State::kArriving) return engine_.behind(&RankControl::arrived, call.sequence);
  return awaited_to_move();
}

ShmEngine::ShmEngine(ShmMembership membership)
    : membership_(std::move(membership)),
      control_(membership_.control, membership_.group.size()),
      owner_(::getpid()),
      spins_(size() <= ::sysconf(_SC_NPROCESSORS_ONLN) ? kSpins : 0) {}

void ShmEngine::begin(std::shared_ptr<ShmCollective> task) {
  guarded([&] {
    const int64_t sequence = sequence_ + 1;
    task->call.sequence = sequence;
    sweep_segments();
    check_abort(*task);
    wait_for_entry(*task, sequence);
    sequence_ = sequence;
    RingCall& own = ring_call(rank(), sequence);
    own.segment = 0;
    task->publish(own);
    own.call = task->call;
    auto& arrived = control_.rank(rank()).arrived;
    arrived.value.store(sequence, std::memory_order_seq_cst);
    // Only the last one to come makes a difference to those who wait.
    if (all_reached(&RankControl::arrived, sequence)) control_.wake();
    in_flight_.push_back(std::move(task));
  });
}

// The entry of kRingCalls calls ago must not be in use any more: neither here, nor by peers.
void ShmEngine::wait_for_entry(const ShmTask& task, int64_t sequence) {
  while (in_flight_.size() >= kRingCalls) {
    const auto oldest = in_flight_.front();
    wait(*oldest);
  }
  EntryUse use(*this, task, sequence - kRingCalls);
  if (use.step()) return;
  const auto ready = [&] {
    progress();
    return use.step();
  };
  wait_until(
      ready, [&]() -> const ShmTask& { return use; }, task.deadline_ns);
}

bool ShmEngine::advance(const ShmCollective& task) {
  if (task.done()) return true;
  guarded([&] { work_on(task, Patience::kLookOnce); });
  return task.done();
}

void ShmEngine::wait(const ShmCollective& task) {
  if (task.done()) return;
  guarded([&] { work_on(task, Patience::kUntilDone); });
}

// Those who only look learn of a deadline or a failure, too.
void ShmEngine::work_on(const ShmCollective& task, Patience patience) {
  const auto ready = [&] {
    progress();
    return task.done();
  };
  const auto blocker = [this]() -> const ShmTask& { return *in_flight_.front(); };
  if (patience == Patience::kUntilDone) {
    wait_until(ready, blocker, task.deadline_ns);
  } else if (!ready()) {
    look_around(ready, blocker, task.deadline_ns);
  }
}

void ShmEngine::run(const std::shared_ptr<ShmCollective>& task) {
  begin(task);
  wait(*task);
}

void ShmEngine::run_message(ShmTask& task) {
  guarded([&] {
    check_abort(task);
    const auto ready = [&] {
      progress();
      return task.step();
    };
    wait_until(
        ready, [&]() -> const ShmTask& { return task; }, task.deadline_ns);
  });
}

void ShmEngine::progress() {
  while (!in_flight_.empty() && in_flight_.front()->step()) {
    ShmCollective& task = *in_flight_.front();
    task.done_ = true;
    control_.rank(rank()).finished.value.store(task.call.sequence, std::memory_order_release);
    in_flight_.pop_front();
  }
}

void ShmEngine::wait_until(const std::function<bool()>& ready,
                           const std::function<const ShmTask&()>& blocker, int64_t deadline_ns) {
  for (int look = 0; look < spins_; ++look) {
    if (ready()) return;
    relax();
  }
  for (int look = 0; look < kYields; ++look) {
    if (ready()) return;
    ::sched_yield();
  }
  while (!look_around(ready, blocker, deadline_ns)) {
    tell_waiting(blocker());
    const int64_t left_ns = std::max<int64_t>(deadline_ns - running_ns(), 1'000);
    if (control_.sleep(std::min(left_ns, kNapNs), ready)) break;
  }
  tell_not_waiting();
}

// Only a rank that sleeps says so: what takes no longer than the looks before costs nothing. After
// an error it stays said, for peers whose deadline comes a little later.
void ShmEngine::tell_waiting(const ShmTask& task) {
  if (told_waiting_ == &task) return;
  told_waiting_ = &task;
  control_.rank(rank()).waiting.store({.waits = 1, .peer = task.peer(), .call = task.call});
}

void ShmEngine::tell_not_waiting() {
  if (told_waiting_ == nullptr) return;
  told_waiting_ = nullptr;
  control_.rank(rank()).waiting.store({});
}

// Looks for what may end the wait: true when it is over, an Error when it is in vain. Whatever a
// peer did before it left or died counts: so first its state is read, then `ready` looks again, and
// only those still awaited after that are to blame.
bool ShmEngine::look_around(const std::function<bool()>& ready,
                            const std::function<const ShmTask&()>& blocker, int64_t deadline_ns) {
  const int64_t now_ns = running_ns();
  const bool see_processes = now_ns - processes_seen_ns_ >= kProcessCheckNs;
  if (see_processes) processes_seen_ns_ = now_ns;
  const bool aborted =
      control_.abort_record().state.load(std::memory_order_acquire) == AbortRecord::kComplete;
  std::vector<std::pair<int, std::string>> gone;  // place, how
  for (int place = 0; place < size(); ++place) {
    if (place == rank()) continue;
    const PeerProcess& process = membership_.processes[static_cast<size_t>(place)];
    if (control_.rank(place).left.value.load(std::memory_order_seq_cst) != 0) {
      gone.emplace_back(place, "left the communicator");
    } else if (see_processes && process.ended()) {
      gone.emplace_back(place, fmt::format("died: process {} has ended", process.pid()));
    }
  }
  if (ready()) return true;
  if (aborted) throw_recorded(blocker());
  if (gone.empty() && now_ns < deadline_ns) return false;
  const ShmTask& task = blocker();
  std::vector<int> awaited = task.awaited();
  for (const auto& [place, how] : gone) {
    if (std::find(awaited.begin(), awaited.end(), place) != awaited.end()) {
      fail_rank(task, place, how);
    }
  }
  if (now_ns >= deadline_ns) fail_stalled(task, awaited);
  return false;
}

std::vector<int> ShmEngine::behind(Counter counter, int64_t target) const {
  std::vector<int> places;
  for (int place = 0; place < size(); ++place) {
    const auto& value = (control_.rank(place).*counter).value;
    if (place != rank() && value.load(std::memory_order_seq_cst) < target) places.push_back(place);
  }
  return places;
}

bool ShmEngine::all_reached(Counter counter, int64_t target) const {
  for (int place = 0; place < size(); ++place) {
    const auto& value = (control_.rank(place).*counter).value;
    if (place != rank() && value.load(std::memory_order_seq_cst) < target) return false;
  }
  return true;
}

void ShmEngine::compare(const Call& own) const {
  bool same = true;
  for (int place = 0; place < size(); ++place) {
    same = same && agree(own, ring_call(place, own.sequence).call);
  }
  if (same) return;
  std::vector<Call> calls;
  calls.reserve(static_cast<size_t>(size()));
  for (int place = 0; place < size(); ++place) {
    calls.push_back(ring_call(place, own.sequence).call);
  }
  throw_mismatch(group(), calls);
}

int64_t ShmEngine::take_pieces(int64_t count) {
  const int64_t first = pieces_;
  pieces_ += count;
  return first;
}

void ShmEngine::reserve_staging() {
  if (staging_reserved_) return;
  control_.reserve_staging(rank());
  staging_reserved_ = true;
}

void ShmEngine::locate(const void* data, int64_t bytes, RingCall& own) const {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const Segment& segment : segments_) {
    const std::byte* memory = segment.mapping->data();
    if (std::less<>()(begin, memory) || std::less<>()(memory + segment.data_bytes, begin + bytes)) {
      continue;
    }
    own.segment = segment.number;
    own.offset = begin - memory;
    return;
  }
}

std::byte* ShmEngine::address(const RingCall& theirs) const {
  for (const Segment& segment : segments_) {
    if (segment.number == theirs.segment) return segment.mapping->data() + theirs.offset;
  }
  throw Error(Code::kInternal, fmt::format("segment {} is not mapped here", theirs.segment));
}

// A segment stays mapped on every rank until no rank holds it: a peer may still reduce from it.
void ShmEngine::sweep_segments() {
  const int64_t dropped = control_.dropped_segments().load(std::memory_order_acquire);
  if (dropped == swept_segments_) return;
  swept_segments_ = dropped;
  std::erase_if(segments_, [this](const Segment& segment) {
    return segment.dropped->load(std::memory_order_acquire) == size();
  });
}

}  // namespace lockstep
