#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "comm/fingerprint.hpp"

namespace lockstep {

/// What the ranks of a group do at the deadline of a call.
struct StallReport {
  std::vector<RankActivity> activities = {};  ///< [group rank]
  std::vector<int> awaited = {};              ///< where throw_stalled() begins
  int64_t waited_ns = 0;                      ///< the longest wait
  std::optional<AbortRecord> cause = {};  ///< a peer ended or gave up meanwhile: no stall, but this
};

/// A call of this rank that has reached its deadline.
struct StalledCall {
  const Fingerprint& call;
  int peer = -1;                  ///< of a message: its other side; -1: a collective
  std::vector<int> awaited = {};  ///< the ranks without which it cannot go on; none: not known
  int64_t waited_ns = 0;          ///< 0: another rank's deadline has come, and this one answers it
};

/// How a session reaches its peers, apart from the data: through shared memory, over TCP, or
/// through the host's communicators of a GPU group. Any thread may call any function.
class ControlLink {
 public:
  virtual ~ControlLink() = default;

  /// Tells all peers why this rank gives up. Only the first record counts. Peers that wait for this
  /// rank, now or later, find it.
  virtual void publish(const AbortRecord& record) = 0;

  /// Asks all ranks what they do. May wait for answers, but never long.
  virtual StallReport survey(const StalledCall& own) = 0;

  /// What is known about a rank, for a note: "process 1234 is stopped by a signal"; may be "".
  virtual std::string state_of(int /*group_rank*/) const { return ""; }
};

/// The control plane of one rank in one group, the same for every transport: it numbers the calls,
/// compares the ranks' fingerprints before data moves, ends what is not done at its deadline, and
/// decides how the communicator ends. The first error wins: peers learn of it as an AbortRecord,
/// and every later call throws it again.
///
/// Calls are numbered by one thread at a time; what concerns errors may come from any thread.
class ControlSession {
 public:
  /// `link` is null in a group of one, and outlives the session.
  ControlSession(Group group, ControlLink* link);
  ControlSession(const ControlSession&) = delete;
  ControlSession& operator=(const ControlSession&) = delete;

  const Group& group() const { return group_; }
  int rank() const { return group_.rank; }
  int size() const { return group_.size(); }

  // Sequence numbers.

  /// The last collective that was numbered.
  int64_t collectives() const { return collectives_; }
  int64_t next_collective() { return ++collectives_; }
  int64_t next_sent(int to) { return ++sent_[static_cast<size_t>(to)]; }
  int64_t next_received(int from) { return ++received_[static_cast<size_t>(from)]; }

  // Agreement.

  /// kCallMismatch, thrown on every rank, unless all made the same call. calls[group rank].
  void require_agreement(std::span<const Fingerprint> calls) const;

  // Failure: the first error wins.

  /// Does a part of a call. An exception ends the communicator; if another one has ended it
  /// meanwhile, that one is thrown.
  template <class Action>
  void guarded(Action&& action) {
    throw_if_broken();
    try {
      action();
    } catch (...) {
      std::rethrow_exception(fail(std::current_exception()));
    }
  }

  bool broken() const { return broken_flag_.load(std::memory_order_acquire); }
  void throw_if_broken() const {
    if (broken()) std::rethrow_exception(first_error());
  }
  std::exception_ptr first_error() const;

  /// Ends the communicator with this error, unless it has ended: then nothing happens. Peers are
  /// notified, then on_failure() is called. Returns the error that counts.
  std::exception_ptr fail(const std::exception_ptr& error) noexcept;

  /// This rank gives up; see Backend::abort.
  void abort(std::string_view reason) noexcept;
  void abort(const AbortRecord& record) noexcept;

  /// Called once, with the error that ended the communicator; must not throw.
  void on_failure(std::function<void(const std::exception_ptr&)> action) {
    on_failure_ = std::move(action);
  }

  /// Call before the link is destroyed: errors are not reported after this.
  void close() {
    on_failure_ = nullptr;
    link_ = nullptr;
  }

  // The ends of a wait.

  /// At the deadline: names the cause, which is the same on every rank.
  [[noreturn]] void fail_stalled(const StalledCall& stalled, const Fingerprint& reported);
  /// A peer gave up with this record.
  [[noreturn]] void fail_recorded(const AbortRecord& record, const Fingerprint& reported,
                                  int64_t waited_ns);

 private:
  bool keep_first(const std::exception_ptr& error) noexcept;
  void tell(const AbortRecord& record, const std::exception_ptr& error) noexcept;

  const Group group_;
  ControlLink* link_;  // null in a group of one, and after close()
  int64_t collectives_ = 0;
  std::vector<int64_t> sent_;      // [group rank], messages
  std::vector<int64_t> received_;  // [group rank], messages
  std::function<void(const std::exception_ptr&)> on_failure_;
  std::atomic<bool> broken_flag_ = false;
  mutable std::mutex mutex_;  // guards first_error_
  std::exception_ptr first_error_;
};

}  // namespace lockstep
