#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/backend.hpp"
#include "comm/control_session.hpp"
#include "comm/shm/shm_control.hpp"
#include "comm/shm/shm_rendezvous.hpp"

namespace lockstep {

class ShmEngine;

/// A call in progress on this rank.
class ShmTask {
 public:
  ShmTask(const Fingerprint& what, const CallContext& context);
  virtual ~ShmTask() = default;
  ShmTask(const ShmTask&) = delete;
  ShmTask& operator=(const ShmTask&) = delete;

  /// Does what can be done without waiting; true when the call is done.
  virtual bool step() = 0;

  /// The ranks without which it cannot go on.
  virtual std::vector<int> awaited() const = 0;

  /// The group rank of the other side of a message; -1 of a collective.
  virtual int peer() const { return -1; }

  /// The call that errors report.
  const Fingerprint& reported() const { return part_of_ == nullptr ? call : *part_of_; }

  Fingerprint call;
  int64_t begun_ns;
  int64_t deadline_ns;

 private:
  const Fingerprint* part_of_;
};

/// A call that all ranks make. Its fingerprint lies in every rank's ring; when all have arrived,
/// the fingerprints are compared, and only then data moves. It is the backend's handle of the call,
/// too.
class ShmCollective : public ShmTask, public Backend::Work {
 public:
  ShmCollective(ShmEngine& engine, const Fingerprint& what, const CallContext& context)
      : ShmTask(what, context), engine_(engine) {}
  ~ShmCollective() override;

  bool advance() final;
  void wait() final;

  bool step() final;
  std::vector<int> awaited() const final;
  bool done() const { return state_ == State::kDone; }

 protected:
  /// Adds to this rank's ring entry what belongs to the call, before others can see it.
  virtual void publish(RingEntry&) {}
  /// All fingerprints are there and agree.
  virtual void arrived() {}
  /// Moves the data; true when done.
  virtual bool move() { return true; }
  virtual std::vector<int> awaited_to_move() const { return {}; }

  ShmEngine& engine_;

 private:
  friend class ShmEngine;
  enum class State { kNew, kArriving, kMoving, kDone } state_ = State::kNew;
  std::shared_ptr<ShmEngine> keeps_alive_;  // of a handle that may outlive its backend
};

/// A call between two ranks, outside the order of collectives. Messages of one direction between
/// two ranks happen one after the other. It is the backend's handle of the call, too.
class ShmMessage : public ShmTask, public Backend::Work {
 public:
  ShmMessage(ShmEngine& engine, const Fingerprint& what, const CallContext& context, int peer)
      : ShmTask(what, context), engine_(engine), peer_(peer) {}
  ~ShmMessage() override;

  bool advance() final;
  void wait() final;
  void set_deadline(int64_t limit_ns) final { deadline_ns = limit_ns; }

  std::vector<int> awaited() const final { return {peer_}; }
  int peer() const final { return peer_; }
  bool done() const { return state_ == State::kDone; }

 protected:
  ShmEngine& engine_;
  const int peer_;

 private:
  friend class ShmEngine;
  enum class State { kNew, kQueued, kDone } state_ = State::kNew;
  std::shared_ptr<ShmEngine> keeps_alive_;  // since the handle may outlive its backend
};

/// The control link of ranks that share memory: the control block, and the peers' processes.
class ShmLink final : public ControlLink {
 public:
  ShmLink(const Group& group, const ShmControl& control, const std::vector<PeerProcess>& processes)
      : group_(group), control_(control), processes_(processes) {}

  void publish(const AbortRecord& record) override;
  StallReport survey(const StalledCall& own) override;
  std::string state_of(int peer) const override;

  /// Whether some rank has given up, and why.
  bool aborted() const {
    return control_.abort_slot().state.load(std::memory_order_acquire) == AbortSlot::kComplete;
  }
  AbortRecord record() const;

 private:
  RankActivity activity_of(int peer) const;

  const Group& group_;
  const ShmControl& control_;
  const std::vector<PeerProcess>& processes_;
};

/// One rank of one group: the order of its calls, its waits, and its end. Used by one thread at a
/// time.
class ShmEngine {
 public:
  explicit ShmEngine(ShmMembership membership);

  const Group& group() const { return session_.group(); }
  int rank() const { return membership_.group.rank; }
  int size() const { return membership_.group.size(); }
  ShmMembership& membership() { return membership_; }
  const ShmControl& control() const { return control_; }
  ControlSession& session() { return session_; }

  /// Publishes a collective. It is worked on whenever this rank waits or advances, strictly in the
  /// order of begin().
  void begin(ShmCollective& task);
  void run(ShmCollective& task) {
    begin(task);
    task.wait();
  }
  /// The same for a handle that keeps the engine alive.
  static void begin(const std::shared_ptr<ShmEngine>& engine, ShmCollective& task) {
    task.keeps_alive_ = engine;
    engine->begin(task);
  }

  /// See Backend::while_waiting().
  void while_waiting(std::function<bool()> progress) {
    progress_outside_ = std::move(progress);
    outside_in_flight_ = false;
  }

  /// Begins a message. It is worked on whenever this rank waits or advances.
  static void begin(const std::shared_ptr<ShmEngine>& engine, ShmMessage& message);

  /// Does a part of a call. An exception ends the communicator.
  template <class Action>
  void guarded(Action&& action) {
    try {
      session_.guarded(action);
    } catch (...) {
      forget_in_flight();
      throw;
    }
  }

  /// This rank gives up; see Backend::abort.
  void abort(const AbortRecord& record) noexcept;
  void abort(std::string_view reason) noexcept;
  /// This rank's communicator is destroyed.
  void leave() noexcept;

  // For collectives.

  using Counter = OwnLine<int64_t> RankControl::*;
  /// Whether all other ranks' counters have reached `target`. A rank knows its own.
  bool all_reached(Counter counter, int64_t target) const;
  /// The ranks whose counters are not.
  std::vector<int> behind(Counter counter, int64_t target) const;
  RingEntry& ring_entry(int peer, int64_t sequence) const {
    return control_.ring_entry(peer, sequence);
  }
  /// Numbers for `count` chunks, the same on all ranks: see Note [Shared counters].
  int64_t take_chunks(int64_t count);
  void reserve_staging();

  // Memory that allocate() made.

  struct Segment {
    int64_t number = 0;
    std::shared_ptr<Mapping> mapping;
    int64_t data_bytes = 0;         // of all ranks
    std::atomic<int32_t>* dropped;  // handles that are gone
  };
  void add_segment(const Segment& segment) { segments_.push_back(segment); }
  /// Sets where peers find these bytes; segment 0: they cannot reach them.
  void locate(const void* data, int64_t bytes, RingEntry& own) const;
  /// Where this rank finds what a peer located.
  std::byte* address(const RingEntry& theirs) const;

 private:
  friend class ShmCollective;
  friend class ShmMessage;
  using Messages = std::vector<std::deque<ShmMessage*>>;  // [peer], owned by their callers

  void advance(const ShmCollective& task);
  void wait(const ShmCollective& task);
  void drop(const ShmCollective& task) noexcept;
  void advance(const ShmMessage& message);
  void wait(const ShmMessage& message);
  void drop(const ShmMessage& message) noexcept;
  Messages& queues_of(const ShmMessage& message) {
    return message.call.operation == Operation::kSend ? sends_ : receives_;
  }
  void progress_messages(Messages& queues);
  void forget_in_flight() noexcept;
  void check_abort(const ShmTask& task);
  void compare(const Fingerprint& own) const;
  void progress();
  enum class Patience { kLookOnce, kUntilDone };
  void work_on(const ShmCollective& task, Patience patience);
  void wait_for_entry(const ShmTask& task);
  void wait_until(const std::function<bool()>& ready,
                  const std::function<const ShmTask&()>& blocker, int64_t deadline_ns);
  bool poll_once(const std::function<bool()>& ready, const std::function<const ShmTask&()>& blocker,
                 int64_t deadline_ns);
  void publish_wait(const ShmTask& task);
  void clear_wait();
  void sweep_segments();

  ShmMembership membership_;
  ShmControl control_;
  ShmLink link_;
  ControlSession session_;
  pid_t owner_;   // a forked child holds a copy, but the rank is not its own
  int spins_;     // looks before it yields: none if ranks share cores
  int patience_;  // sleepers look so much less often where many ranks share a core
  int64_t chunks_ = 0;
  bool staging_reserved_ = false;
  std::deque<ShmCollective*> in_flight_;  // owned by their callers
  Messages sends_;
  Messages receives_;
  int64_t messages_in_flight_ = 0;  // in both
  std::function<bool()> progress_outside_;
  bool outside_in_flight_ = false;
  std::vector<Segment> segments_;
  int64_t swept_segments_ = 0;
  int64_t processes_seen_ns_ = 0;
  const ShmTask* published_wait_ = nullptr;  // the call that the peers see this rank wait in
};

}  // namespace lockstep
