#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "comm/backend.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/shm/shm_meeting.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

class ShmEngine;

/// A call in progress on this rank.
class ShmTask {
 public:
  ShmTask(const Call& what, const CallContext& context);
  virtual ~ShmTask() = default;
  ShmTask(const ShmTask&) = delete;
  ShmTask& operator=(const ShmTask&) = delete;

  /// Does what can be done without waiting; true when the call is done.
  virtual bool step() = 0;

  /// The places without which it cannot go on.
  virtual std::vector<int> awaited() const = 0;

  /// Of a message: the place of its other side.
  virtual int peer() const { return -1; }

  Call call;
  int64_t begun_ns;
  int64_t deadline_ns;
};

/// A call that all ranks make. It lies in every rank's ring; when all have arrived, the calls are
/// compared, and only then data moves.
class ShmCollective : public ShmTask {
 public:
  ShmCollective(ShmEngine& engine, const Call& what, const CallContext& context)
      : ShmTask(what, context), engine_(engine) {}

  bool step() final;
  std::vector<int> awaited() const final;
  bool done() const { return done_; }

 protected:
  /// Adds to this rank's ring entry what belongs to the call, before others can see it.
  virtual void publish(RingCall&) {}
  /// All calls are there and agree.
  virtual void arrived() {}
  /// Moves the data; true when done.
  virtual bool move() { return true; }
  virtual std::vector<int> awaited_to_move() const { return {}; }

  ShmEngine& engine_;

 private:
  friend class ShmEngine;
  enum class State { kArriving, kMoving } state_ = State::kArriving;
  bool done_ = false;
};

/// One rank of one group: the order of its calls, its waits, and its end. Used by one thread at a
/// time.
class ShmEngine {
 public:
  explicit ShmEngine(ShmMembership membership);

  const Group& group() const { return membership_.group; }
  int rank() const { return membership_.group.rank; }
  int size() const { return membership_.group.size(); }
  ShmMembership& membership() { return membership_; }
  const ShmControl& control() const { return control_; }

  /// Publishes a collective. It is worked on whenever this rank waits or advances, strictly in the
  /// order of begin().
  void begin(std::shared_ptr<ShmCollective> task);
  bool advance(const ShmCollective& task);
  void wait(const ShmCollective& task);
  void run(const std::shared_ptr<ShmCollective>& task);

  /// Runs a call between two ranks, which has no place in the order of collectives.
  void run_message(ShmTask& task);

  /// Does a part of a call. An exception ends the communicator: peers learn of it, and every later
  /// call throws it again.
  void guarded(const std::function<void()>& action);

  /// This rank gives up; see Backend::abort. While collectives are in flight from their thread
  /// only.
  void abort(std::string_view reason) noexcept;
  /// This rank's communicator is destroyed.
  void leave() noexcept;

  // For collectives.

  using Counter = OwnLine<int64_t> RankControl::*;
  /// Whether all other ranks' counters are at `target`. Its own a rank knows without looking.
  bool all_reached(Counter counter, int64_t target) const;
  /// The places whose are not.
  std::vector<int> behind(Counter counter, int64_t target) const;
  RingCall& ring_call(int place, int64_t sequence) const {
    return control_.ring_call(place, sequence);
  }
  /// Numbers for `count` pieces, the same on all ranks: see Note [Shared counters].
  int64_t take_pieces(int64_t count);
  void reserve_staging();

  // Memory that allocate() made.

  struct Segment {
    int64_t number = 0;
    std::shared_ptr<Mapping> mapping;
    int64_t data_bytes = 0;         // of all ranks
    std::atomic<int32_t>* dropped;  // handles that are gone
  };
  void add_segment(const Segment& segment) { segments_.push_back(segment); }
  /// Says where peers find these bytes; segment 0 where they cannot.
  void locate(const void* data, int64_t bytes, RingCall& own) const;
  /// Where this rank finds what a peer located.
  std::byte* address(const RingCall& theirs) const;

 private:
  void check_abort(const ShmTask& task) const;
  void compare(const Call& own) const;
  void progress();
  enum class Patience { kLookOnce, kUntilDone };
  void work_on(const ShmCollective& task, Patience patience);
  void wait_for_entry(const ShmTask& task, int64_t sequence);
  void wait_until(const std::function<bool()>& ready,
                  const std::function<const ShmTask&()>& blocker, int64_t deadline_ns);
  bool look_around(const std::function<bool()>& ready,
                   const std::function<const ShmTask&()>& blocker, int64_t deadline_ns);
  void tell_waiting(const ShmTask& task);
  void tell_not_waiting();
  std::string state_of(int place) const;
  RankActivity activity_of(int place) const;
  [[noreturn]] void fail_rank(const ShmTask& task, int place, const std::string& reason);
  [[noreturn]] void fail_stalled(const ShmTask& task, const std::vector<int>& awaited) const;
  [[noreturn]] void throw_recorded(const ShmTask& task) const;
  void record(Code code, int blamed, std::string_view text) noexcept;
  void record_current_exception() noexcept;
  void sweep_segments();

  friend class ShmCollective;

  // The error that ended this communicator; null while none has.
  std::exception_ptr broken() const;
  // False: there was one already.
  bool keep_first(const std::exception_ptr& error) noexcept;

  ShmMembership membership_;
  ShmControl control_;
  pid_t owner_;  // a forked child holds a copy, but the rank is not its own
  int spins_;    // looks before it yields: none where ranks share cores
  int64_t sequence_ = 0;
  int64_t pieces_ = 0;
  bool staging_reserved_ = false;
  std::deque<std::shared_ptr<ShmCollective>> in_flight_;
  std::vector<Segment> segments_;
  int64_t swept_segments_ = 0;
  int64_t processes_seen_ns_ = 0;
  const ShmTask* told_waiting_ = nullptr;  // the call that the peers see this rank wait in
  mutable std::mutex broken_mutex_;        // abort() may come from another thread than a message
  std::exception_ptr broken_;
};

}  // namespace lockstep
