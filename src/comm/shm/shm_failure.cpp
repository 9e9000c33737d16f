// How a rank's communicator ends before its time: by an error here, by a peer's, or on request.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "base/running_clock.hpp"
#include "comm/shm/shm_engine.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

std::exception_ptr ShmEngine::broken() const {
  const std::lock_guard lock(broken_mutex_);
  return broken_;
}

bool ShmEngine::keep_first(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(broken_mutex_);
  if (broken_) return false;
  broken_ = error;
  return true;
}

void ShmEngine::guarded(const std::function<void()>& action) {
  if (const auto error = broken()) {
    in_flight_.clear();  // abort() may have come from another thread, which must not
    std::rethrow_exception(error);
  }
  try {
    action();
  } catch (...) {
    if (keep_first(std::current_exception())) record_current_exception();
    in_flight_.clear();
    throw;
  }
}

void ShmEngine::check_abort(const ShmTask& task) const {
  const auto& state = control_.abort_record().state;
  if (state.load(std::memory_order_acquire) == AbortRecord::kComplete) throw_recorded(task);
}

void ShmEngine::fail_rank(const ShmTask& task, int place, const std::string& reason) {
  record(Code::kRankFailed, place, reason);
  throw_rank_failed(group(), task.call, place, reason);
}

std::string ShmEngine::state_of(int place) const {
  const int64_t made = control_.rank(place).arrived.value.load(std::memory_order_relaxed);
  return fmt::format("{}; it has begun {} collective{}",
                     membership_.processes[static_cast<size_t>(place)].state(), made,
                     made == 1 ? "" : "s");
}

RankActivity ShmEngine::activity_of(int place) const {
  const RankControl& control = control_.rank(place);
  RankActivity activity;
  activity.silent = membership_.processes[static_cast<size_t>(place)].stopped();
  activity.arrived = control.arrived.value.load(std::memory_order_seq_cst);
  activity.finished = control.finished.value.load(std::memory_order_seq_cst);
  const WaitingCall waiting = control.waiting.load();
  if (waiting.waits != 0) {
    activity.waiting.push_back({waiting.call, static_cast<int>(waiting.peer)});
  }
  activity.state = state_of(place);
  return activity;
}

void ShmEngine::fail_stalled(const ShmTask& task, const std::vector<int>& awaited) const {
  const int64_t waited_ns = running_ns() - task.begun_ns;
  std::vector<RankActivity> activities;
  for (int place = 0; place < size(); ++place) activities.push_back(activity_of(place));
  activities[static_cast<size_t>(rank())].waiting = {{task.call, task.peer()}};
  throw_stalled(group(), task.call, awaited, activities, waited_ns);
}

// The first culprit stays the culprit: those who learn of it second hand blame the same rank.
void ShmEngine::throw_recorded(const ShmTask& task) const {
  const AbortRecord& why = control_.abort_record();
  const auto code = static_cast<Code>(why.code);
  const bool blames_other = why.blamed >= 0 && why.blamed != rank() && why.blamed != why.by;
  if (code == Code::kCallMismatch) {
    throw RankError(code,
                    why.blamed < 0 ? -1 : group().world_ranks.at(static_cast<size_t>(why.blamed)),
                    why.text, "make the same calls in the same order on every rank");
  }
  if (code == Code::kRankAbsent && blames_other) {
    const MissingRank missing{why.blamed, state_of(why.blamed)};
    throw_absent(group(), task.call, {&missing, 1}, running_ns() - task.begun_ns);
  }
  if (code == Code::kRankFailed && blames_other) {
    throw_rank_failed(group(), task.call, why.blamed, why.text);
  }
  throw_rank_failed(group(), task.call, why.by, fmt::format("gave up: {}", why.text));
}

void ShmEngine::record(Code code, int blamed, std::string_view text) noexcept {
  AbortRecord& why = control_.abort_record();
  uint32_t none = AbortRecord::kNone;
  if (!why.state.compare_exchange_strong(none, AbortRecord::kWriting)) return;
  why.by = rank();
  why.blamed = blamed;
  why.code = static_cast<int32_t>(code);
  why.text[text.copy(why.text, sizeof why.text - 1)] = '\0';
  why.state.store(AbortRecord::kComplete, std::memory_order_seq_cst);
  control_.wake();
}

void ShmEngine::record_current_exception() noexcept {
  try {
    throw;
  } catch (const RankError& error) {
    const auto& ranks = group().world_ranks;
    const auto found = std::find(ranks.begin(), ranks.end(), error.blamed_rank());
    record(error.code(), found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin()),
           error.message());
  } catch (const Error& error) {
    record(error.code(), rank(), error.message());
  } catch (const std::exception& error) {
    record(Code::kInternal, rank(), error.what());
  } catch (...) {
    record(Code::kInternal, rank(), "an unknown exception");
  }
}

void ShmEngine::abort(std::string_view reason) noexcept {
  if (broken() || owner_ != ::getpid()) return;
  record(Code::kRankFailed, rank(), reason);
  try {
    keep_first(std::make_exception_ptr(RankError(
        Code::kRankFailed, group().world_ranks[static_cast<size_t>(rank())],
        fmt::format("this rank gave up: {}", reason), "make a new communicator after an abort")));
  } catch (...) {
    keep_first(std::current_exception());
  }
}

void ShmEngine::leave() noexcept {
  if (owner_ != ::getpid()) return;
  if (std::uncaught_exceptions() > 0) {
    abort("failed with an exception");
  } else if (!in_flight_.empty()) {
    abort("destroyed its communicator while calls were in flight");
  }
  control_.announce(control_.rank(rank()).left, uint32_t{1});
}

}  // namespace lockstep
