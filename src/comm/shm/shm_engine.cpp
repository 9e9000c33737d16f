#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>

#include "base/counted.hpp"
#include "base/running_clock.hpp"
#include "comm/shm/shm_engine.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

constexpr int kSpins = 1000;  // some 20 microseconds
constexpr int kYields = 40;
constexpr int64_t kPollOutsideNs = 100'000;  // nobody wakes this rank for what goes on elsewhere
constexpr int64_t kPollNs = 2'000'000;       // polling interval of a sleeper that nobody wakes
constexpr int64_t kProcessCheckNs = 10'000'000;  // a peer's death is seen within this

// How much rarer both are: hundreds of ranks on few cores would spend those looking at each other.
int patience_of(int ranks) {
  constexpr int kFewRanksOnACore = 4;
  constexpr int kMost = 16;
  const auto cores = static_cast<int>(std::max<long>(1, ::sysconf(_SC_NPROCESSORS_ONLN)));
  return std::clamp(ranks / cores / kFewRanksOnACore, 1, kMost);
}

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

ShmTask::ShmTask(const Fingerprint& what, const CallContext& context)
    : call(what),
      begun_ns(running_ns()),
      deadline_ns(context.deadline_ns),
      part_of_(context.part_of) {
  call.set_label(context.label);
}

ShmCollective::~ShmCollective() {
  if (state_ == State::kArriving || state_ == State::kMoving) engine_.drop(*this);
}

bool ShmCollective::advance() {
  if (!done()) engine_.advance(*this);
  return done();
}

void ShmCollective::wait() {
  if (!done()) engine_.wait(*this);
}

ShmMessage::~ShmMessage() {
  if (state_ == State::kQueued) engine_.drop(*this);
}

bool ShmMessage::advance() {
  if (!done()) engine_.advance(*this);
  return done();
}

void ShmMessage::wait() {
  if (!done()) engine_.wait(*this);
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
      link_(membership_.group, control_, membership_.processes),
      session_(membership_.group, &link_),
      owner_(::getpid()),
      spins_(size() <= ::sysconf(_SC_NPROCESSORS_ONLN) ? kSpins : 0),
      patience_(patience_of(size())),
      sends_(static_cast<size_t>(size())),
      receives_(static_cast<size_t>(size())) {}

void ShmEngine::begin(ShmCollective& task) {
  guarded([&] {
    const int64_t sequence = session_.next_collective();
    task.call.sequence = sequence;
    sweep_segments();
    check_abort(task);
    wait_for_entry(task);
    RingEntry& own = ring_entry(rank(), sequence);
    own.segment = 0;
    task.publish(own);
    own.call = task.call;
    auto& arrived = control_.rank(rank()).arrived;
    arrived.value.store(sequence, std::memory_order_seq_cst);
    // Waiters need to be woken only when the last rank arrives.
    if (all_reached(&RankControl::arrived, sequence)) control_.wake();
    task.state_ = ShmCollective::State::kArriving;
    in_flight_.push_back(&task);
  });
}

// The entry of kRingCalls calls ago must not be in use any more: neither here, nor by peers.
void ShmEngine::wait_for_entry(const ShmTask& task) {
  while (in_flight_.size() >= kRingCalls) wait(*in_flight_.front());
  EntryUse use(*this, task, task.call.sequence - kRingCalls);
  if (use.step()) return;
  const auto ready = [&] {
    progress();
    return use.step();
  };
  wait_until(
      ready, [&]() -> const ShmTask& { return use; }, task.deadline_ns);
}

void ShmEngine::advance(const ShmCollective& task) {
  guarded([&] { work_on(task, Patience::kLookOnce); });
}

void ShmEngine::wait(const ShmCollective& task) {
  guarded([&] { work_on(task, Patience::kUntilDone); });
}

void ShmEngine::drop(const ShmCollective& task) noexcept {
  abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                       : "dropped a call before it was done");
  std::erase(in_flight_, &task);
}

// advance() notices deadlines and failures, too.
void ShmEngine::work_on(const ShmCollective& task, Patience patience) {
  const auto ready = [&] {
    progress();
    return task.done();
  };
  const auto blocker = [this]() -> const ShmTask& { return *in_flight_.front(); };
  if (patience == Patience::kUntilDone) {
    wait_until(ready, blocker, task.deadline_ns);
  } else if (!ready()) {
    poll_once(ready, blocker, task.deadline_ns);
  }
}

void ShmEngine::begin(const std::shared_ptr<ShmEngine>& engine, ShmMessage& message) {
  engine->guarded([&] {
    engine->check_abort(message);
    message.keeps_alive_ = engine;
    message.state_ = ShmMessage::State::kQueued;
    engine->queues_of(message)[static_cast<size_t>(message.peer())].push_back(&message);
    ++engine->messages_in_flight_;
    engine->progress();
  });
}

void ShmEngine::advance(const ShmMessage& message) {
  guarded([&] {
    const auto ready = [&] {
      progress();
      return message.done();
    };
    if (!ready()) {
      poll_once(
          ready, [&]() -> const ShmTask& { return message; }, message.deadline_ns);
    }
  });
}

void ShmEngine::wait(const ShmMessage& message) {
  guarded([&] {
    const auto ready = [&] {
      progress();
      return message.done();
    };
    wait_until(
        ready, [&]() -> const ShmTask& { return message; }, message.deadline_ns);
  });
}

void ShmEngine::drop(const ShmMessage& message) noexcept {
  abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                       : "dropped a message before it was done");
  auto& queue = queues_of(message)[static_cast<size_t>(message.peer())];
  messages_in_flight_ -= static_cast<int64_t>(std::erase(queue, &message));
}

void ShmEngine::progress_messages(Messages& queues) {
  for (auto& queue : queues) {
    while (!queue.empty() && queue.front()->step()) {
      queue.front()->state_ = ShmMessage::State::kDone;
      queue.pop_front();
      --messages_in_flight_;
    }
  }
}

void ShmEngine::forget_in_flight() noexcept {
  in_flight_.clear();
  for (auto& queue : sends_) queue.clear();
  for (auto& queue : receives_) queue.clear();
  messages_in_flight_ = 0;
}

void ShmEngine::progress() {
  while (!in_flight_.empty() && in_flight_.front()->step()) {
    ShmCollective& task = *in_flight_.front();
    task.state_ = ShmCollective::State::kDone;
    control_.rank(rank()).finished.value.store(task.call.sequence, std::memory_order_release);
    in_flight_.pop_front();
  }
  if (progress_outside_) outside_in_flight_ = progress_outside_();
  if (messages_in_flight_ == 0) return;
  progress_messages(sends_);
  progress_messages(receives_);
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
  while (!poll_once(ready, blocker, deadline_ns)) {
    publish_wait(blocker());
    const int64_t left_ns = std::max<int64_t>(deadline_ns - running_ns(), 1'000);
    const int64_t sleep_ns = outside_in_flight_ ? kPollOutsideNs : kPollNs * patience_;
    if (control_.sleep(std::min(left_ns, sleep_ns), ready)) break;
  }
  clear_wait();
}

// Only a rank that sleeps shows the call: a short wait costs nothing. After an error the call stays
// shown, for peers whose deadline comes a little later.
void ShmEngine::publish_wait(const ShmTask& task) {
  if (published_wait_ == &task) return;
  published_wait_ = &task;
  control_.rank(rank()).waiting.store({.waits = 1, .peer = task.peer(), .call = task.call});
}

void ShmEngine::clear_wait() {
  if (published_wait_ == nullptr) return;
  published_wait_ = nullptr;
  control_.rank(rank()).waiting.store({});
}

// Looks for what may end the wait: returns true when it is over and throws when it is in vain.
// Work that a peer finished before it left or died still counts, so its state is read before
// `ready` is checked again; only peers still awaited after that are to blame.
bool ShmEngine::poll_once(const std::function<bool()>& ready,
                          const std::function<const ShmTask&()>& blocker, int64_t deadline_ns) {
  const int64_t now_ns = running_ns();
  const bool see_processes = now_ns - processes_seen_ns_ >= kProcessCheckNs * patience_;
  if (see_processes) processes_seen_ns_ = now_ns;
  const bool aborted = link_.aborted();
  // With hundreds of ranks a system call for each of them would take most of the time.
  std::vector<bool> ended;
  if (see_processes) ended = PeerProcess::which_ended(membership_.processes);
  std::vector<std::pair<int, std::string>> gone;  // group rank, how
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const auto index = static_cast<size_t>(peer);
    if (control_.rank(peer).left.value.load(std::memory_order_seq_cst) != 0) {
      gone.emplace_back(peer, "left the communicator");
    } else if (see_processes && ended[index]) {
      gone.emplace_back(
          peer, fmt::format("died: process {} has ended", membership_.processes[index].pid()));
    }
  }
  if (ready()) return true;
  if (aborted) check_abort(blocker());
  if (gone.empty() && now_ns < deadline_ns) return false;
  const ShmTask& task = blocker();
  std::vector<int> awaited = task.awaited();
  for (const auto& [peer, how] : gone) {
    if (std::find(awaited.begin(), awaited.end(), peer) != awaited.end()) {
      throw_rank_failed(group(), task.reported(), peer, how);
    }
  }
  if (now_ns >= deadline_ns) {
    session_.fail_stalled({task.call, task.peer(), std::move(awaited), now_ns - task.begun_ns},
                          task.reported());
  }
  return false;
}

std::vector<int> ShmEngine::behind(Counter counter, int64_t target) const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    const auto& value = (control_.rank(peer).*counter).value;
    if (peer != rank() && value.load(std::memory_order_seq_cst) < target) peers.push_back(peer);
  }
  return peers;
}

bool ShmEngine::all_reached(Counter counter, int64_t target) const {
  for (int peer = 0; peer < size(); ++peer) {
    const auto& value = (control_.rank(peer).*counter).value;
    if (peer != rank() && value.load(std::memory_order_seq_cst) < target) return false;
  }
  return true;
}

void ShmEngine::compare(const Fingerprint& own) const {
  bool same = true;
  for (int peer = 0; peer < size(); ++peer) {
    same = same && agree(own, ring_entry(peer, own.sequence).call);
  }
  if (same) return;
  std::vector<Fingerprint> calls;
  calls.reserve(static_cast<size_t>(size()));
  for (int peer = 0; peer < size(); ++peer) {
    calls.push_back(ring_entry(peer, own.sequence).call);
  }
  session_.require_agreement(calls);
}

int64_t ShmEngine::take_chunks(int64_t count) {
  const int64_t first = chunks_;
  chunks_ += count;
  return first;
}

void ShmEngine::reserve_staging() {
  if (staging_reserved_) return;
  control_.reserve_staging(rank());
  staging_reserved_ = true;
}

void ShmEngine::locate(const void* data, int64_t bytes, RingEntry& own) const {
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

std::byte* ShmEngine::address(const RingEntry& theirs) const {
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

// How a rank's communicator ends before its time: by an error here, by a peer's, or on request.

void ShmEngine::check_abort(const ShmTask& task) {
  if (!link_.aborted()) return;
  session_.fail_recorded(link_.record(), task.reported(), running_ns() - task.begun_ns);
}

void ShmEngine::abort(const AbortRecord& record) noexcept {
  if (owner_ == ::getpid()) session_.abort(record);
}

void ShmEngine::abort(std::string_view reason) noexcept {
  if (owner_ == ::getpid()) session_.abort(reason);
}

void ShmEngine::leave() noexcept {
  if (owner_ != ::getpid()) return;
  if (std::uncaught_exceptions() > 0) {
    abort("failed with an exception");
  } else if (!in_flight_.empty() || messages_in_flight_ > 0) {
    abort("destroyed its communicator while calls were in flight");
  }
  control_.announce(control_.rank(rank()).left, uint32_t{1});
}

void ShmLink::publish(const AbortRecord& record) {
  AbortSlot& slot = control_.abort_slot();
  const std::string bytes = record.encode();
  uint32_t none = AbortSlot::kNone;
  if (!slot.state.compare_exchange_strong(none, AbortSlot::kWriting)) return;
  slot.bytes = static_cast<uint32_t>(bytes.size());
  std::memcpy(slot.data(), bytes.data(), bytes.size());
  slot.state.store(AbortSlot::kComplete, std::memory_order_seq_cst);
  control_.wake();
}

AbortRecord ShmLink::record() const {
  AbortSlot& slot = control_.abort_slot();
  const std::string_view bytes(slot.data(), slot.bytes);
  return AbortRecord::decode(bytes).value_or(AbortRecord{});
}

std::string ShmLink::state_of(int peer) const {
  const int64_t made = control_.rank(peer).arrived.value.load(std::memory_order_relaxed);
  return fmt::format("{}; it has begun {}", processes_[static_cast<size_t>(peer)].state(),
                     counted(made, "collective"));
}

RankActivity ShmLink::activity_of(int peer) const {
  const RankControl& control = control_.rank(peer);
  RankActivity activity;
  activity.silent = processes_[static_cast<size_t>(peer)].stopped();
  activity.arrived = control.arrived.value.load(std::memory_order_seq_cst);
  activity.finished = control.finished.value.load(std::memory_order_seq_cst);
  const WaitingCall waiting = control.waiting.load();
  if (waiting.waits != 0) {
    activity.waiting.push_back({waiting.call, static_cast<int>(waiting.peer)});
  }
  activity.state = state_of(peer);
  return activity;
}

StallReport ShmLink::survey(const StalledCall& own) {
  StallReport report{.awaited = own.awaited, .waited_ns = own.waited_ns};
  for (int peer = 0; peer < group_.size(); ++peer) report.activities.push_back(activity_of(peer));
  report.activities[static_cast<size_t>(group_.rank)].waiting = {{own.call, own.peer}};
  return report;
}

}  // namespace lockstep
