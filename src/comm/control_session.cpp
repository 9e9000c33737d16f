#include "comm/control_session.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lockstep {

ControlSession::ControlSession(Group group, ControlLink* link)
    : group_(std::move(group)),
      link_(link),
      sent_(static_cast<size_t>(group_.size())),
      received_(static_cast<size_t>(group_.size())) {}

void ControlSession::require_agreement(std::span<const Fingerprint> calls) const {
  const bool same = std::all_of(calls.begin(), calls.end(), [&](const Fingerprint& call) {
    return agree(calls.front(), call);
  });
  if (!same) throw_mismatch(group_, calls);
}

std::exception_ptr ControlSession::first_error() const {
  const std::lock_guard lock(mutex_);
  return first_error_;
}

bool ControlSession::keep_first(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (first_error_) return false;
  first_error_ = error;
  broken_flag_.store(true, std::memory_order_release);
  return true;
}

void ControlSession::tell(const AbortRecord& record, const std::exception_ptr& error) noexcept {
  try {
    if (link_ != nullptr) link_->publish(record);
  } catch (...) {
    // There is no memory for a record: peers notice that this rank has left instead.
  }
  if (on_failure_) on_failure_(error);
}

std::exception_ptr ControlSession::fail(const std::exception_ptr& error) noexcept {
  if (!keep_first(error)) return first_error();
  try {
    tell(AbortRecord::of(error, group_), error);
  } catch (...) {
    tell({.by = group_.rank, .blamed = group_.rank}, error);
  }
  return error;
}

void ControlSession::abort(std::string_view reason) noexcept {
  try {
    abort(AbortRecord{.code = Code::kRankFailed,
                      .by = group_.rank,
                      .blamed = group_.rank,
                      .text = std::string(reason)});
  } catch (...) {
    abort(AbortRecord{.by = group_.rank, .blamed = group_.rank});
  }
}

void ControlSession::abort(const AbortRecord& record) noexcept {
  if (broken()) return;
  std::exception_ptr error;
  try {
    error = std::make_exception_ptr(
        CollectiveError(Code::kRankFailed, group_.world_rank(group_.rank), record,
                        fmt::format("this rank gave up: {}", record.text),
                        "make a new communicator after an abort"));
  } catch (...) {
    error = std::current_exception();
  }
  if (keep_first(error)) tell(record, error);
}

void ControlSession::fail_stalled(const StalledCall& stalled, const Fingerprint& reported) {
  const StallReport report = link_->survey(stalled);
  if (report.cause) fail_recorded(*report.cause, reported, report.waited_ns);
  throw_stalled(group_, reported, report.awaited, report.activities, report.waited_ns);
}

void ControlSession::fail_recorded(const AbortRecord& record, const Fingerprint& reported,
                                   int64_t waited_ns) {
  const std::string state =
      link_ != nullptr && record.blamed >= 0 ? link_->state_of(record.blamed) : "";
  throw_recorded(group_, reported, record, state, waited_ns);
}

}  // namespace lockstep
