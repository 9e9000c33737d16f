#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend.hpp"
#include "comm/control_session.hpp"
#include "comm/network/tcp_control.hpp"
#include "comm/network/transport_loader.hpp"
#include "comm/self_messages.hpp"
#include "net/store.hpp"

namespace lockstep {

/// A module's connections of one rank to its group, owned.
class TransportData {
 public:
  /// Exchanges the module's addresses over the link and connects. kRendezvous if that fails.
  TransportData(const BackendInfo& info, const Group& group, const std::string& address,
                TcpControl& link, int64_t deadline_ns);
  ~TransportData() { api_.destroy(context_); }
  TransportData(const TransportData&) = delete;
  TransportData& operator=(const TransportData&) = delete;

  /// How a transfer ended.
  struct Outcome {
    LockstepTransportStatus status = LOCKSTEP_TRANSPORT_OK;
    std::string text;  ///< the module's own words, unless all went well
  };

  /// `transfer(api, context, call)` calls one of the module's transfers. `tag` tells transfers
  /// apart that overlap in time.
  template <class Transfer>
  Outcome run(uint32_t tag, int64_t deadline_ns, Transfer&& transfer) {
    LockstepTransportMessage message{};
    const LockstepTransportCall call{deadline_ns, tag, &message};
    const LockstepTransportStatus status = transfer(api_, context_, call);
    return {status, message.text};
  }

  /// Blocks that are under way between this rank and its peers, apart from other transfers. Once
  /// destroyed, it leaves its buffers alone, even if blocks have not moved.
  class Exchange {
   public:
    Exchange(const LockstepTransportApi& api, LockstepTransportExchange* blocks)
        : api_(api), blocks_(blocks) {}
    ~Exchange() { api_.drop_exchange(blocks_); }
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

   private:
    friend class TransportData;
    const LockstepTransportApi& api_;
    LockstepTransportExchange* blocks_;
  };
  std::unique_ptr<Exchange> own(LockstepTransportExchange* blocks) {
    return std::make_unique<Exchange>(api_, blocks);
  }

  /// Waits until the blocks have moved.
  Outcome end(Exchange& exchange) {
    LockstepTransportMessage message{};
    const LockstepTransportStatus status = api_.end_exchange(exchange.blocks_, &message);
    return {status, message.text};
  }

  /// From any thread: ends all transfers here and at the peers.
  void abort() { api_.abort(context_); }

  /// Whether the module reduces, and does not only move data.
  bool reduces() const { return api_.all_reduce != nullptr; }

 private:
  void connect(const BackendInfo& info, const Group& group, TcpControl& link, int64_t deadline_ns);

  const LockstepTransportApi& api_;
  LockstepTransportContext* context_ = nullptr;
};

/// One rank's part in a group over Gloo or MPI: a thread that makes the collectives strictly in
/// order, each after all ranks have compared their fingerprints, and one for the messages to and
/// from each peer with which there are any. A group of one rank has no connections, and nothing is
/// ever exchanged.
class NetworkCore {
  struct Lane;

 public:
  class Task;

  /// What a call does once all ranks agree: calls[group rank]; none of a message. Runs in a thread
  /// of the core.
  using Body = std::function<void(const Task& task, std::span<const Fingerprint> calls)>;

  /// What a collective does while the ranks compare their calls, if it has something to do then. It
  /// returns the body.
  using Preparation = std::function<Body(const Task& task)>;

  /// A call on its way. It is the backend's handle of the call, too.
  class Task final : public Backend::Work {
   public:
    Task(std::shared_ptr<NetworkCore> core, const Fingerprint& what, const CallContext& context,
         Body body = nullptr);
    ~Task() override;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

    bool advance() override { return core_->done(*this); }
    void wait() override { core_->finish(*this); }

    /// The call that errors speak of.
    const Fingerprint& reported() const { return part_of_ == nullptr ? call : *part_of_; }
    int64_t waited_ns() const;

    /// Before the call begins: sends these few bytes with its fingerprint.
    void attach(const void* data, int64_t bytes) {
      attached_ = {static_cast<const char*>(data), static_cast<size_t>(bytes)};
    }
    /// Before the call begins: in place of a body.
    void prepare(Preparation preparation) { preparation_ = std::move(preparation); }

    /// In its body: what came with a rank's fingerprint.
    const void* attached_by(int rank, int64_t bytes) const;

    Fingerprint call;
    const int64_t begun_ns;
    const int64_t deadline_ns;
    int peer = -1;  ///< of a message: the group rank of its other side

   private:
    friend class NetworkCore;
    Lane* lane_ = nullptr;  // that it was put into; null: it was never begun
    std::shared_ptr<NetworkCore> core_;
    const Fingerprint* part_of_;
    const bool waits_at_once_;
    Preparation preparation_;
    Body body_;
    std::string_view attached_;
    std::vector<std::string> exchanged_;  // [group rank]: fingerprints, and what came with them
    enum class State { kNew, kQueued, kDone } state_ = State::kNew;  // under the core's mutex
    std::exception_ptr error_;                                       // under the core's mutex
  };

  NetworkCore(Group group, Store& store, const std::string& address, int64_t deadline_ns,
              const BackendInfo& info);
  ~NetworkCore() { shut_down(); }
  NetworkCore(const NetworkCore&) = delete;
  NetworkCore& operator=(const NetworkCore&) = delete;

  const Group& group() const { return session_.group(); }
  ControlSession& session() { return session_; }
  const BackendInfo& info() const { return info_; }
  bool reduces() const { return !data_ || data_->reduces(); }  ///< see TransportData

  /// Queues a collective and gives it the next sequence number.
  void begin(Task& task);
  bool done(const Task& task);    ///< throws the task's error
  void finish(const Task& task);  ///< waits; throws the task's error

  /// Queues a message, which has a peer, and numbers it. It must not wait behind collectives, whose
  /// order the two ranks may see differently, but only behind earlier messages of its direction.
  void begin_message(Task& task);

  /// Numbers a message that moves by other means than this core.
  void number_message(Task& task);

  /// Shows the message to peers that ask what this rank waits for.
  class ShownMessage {
   public:
    ShownMessage(NetworkCore& core, const Task& task);
    ~ShownMessage();
    ShownMessage(const ShownMessage&) = delete;
    ShownMessage& operator=(const ShownMessage&) = delete;

   private:
    NetworkCore& core_;
    std::list<RankActivity::Waiting>::iterator at_;
  };

  /// In the body of a message.
  void send(const Task& task, const ConstBuffer& buffer);
  void recv(const Task& task, const Buffer& buffer);
  SelfMessages& own_messages() { return own_messages_; }

  /// In a task's body: moves data, and turns a failure into the error that names its cause.
  template <class Transfer>
  void transfer(const Task& task, Transfer&& move) {
    if (!data_) return;
    check(task, data_->run(static_cast<uint32_t>(task.call.sequence), task.deadline_ns, move));
  }

  /// What a rank gives to its peers and takes from them: [group rank], in bytes of the two buffers.
  struct Blocks {
    const void* input = nullptr;
    std::vector<LockstepTransportBlock> given;
    void* output = nullptr;
    std::vector<LockstepTransportBlock> taken;
  };

  /// In a task's body: begins to exchange blocks, and waits for them. `part` distinguishes the
  /// exchanges of one task.
  std::unique_ptr<TransportData::Exchange> begin_exchange(const Task& task, uint32_t part,
                                                          const Blocks& blocks);
  void end_exchange(const Task& task, TransportData::Exchange& exchange) {
    check(task, data_->end(exchange));
  }

  /// Call in a task's body, or for a message, if data that bypasses the module could not be moved,
  /// as `what` says. Throws the cause that peers report.
  [[noreturn]] void fail_transfer(const Task& task, std::string_view what);

  /// `action` runs in any thread when the communicator has ended, so that waits for peers
  /// outside this core end, too.
  void on_broken(std::function<void()> action);

  /// `progress` moves messages outside this core as far as they go without waiting, and returns
  /// whether some are left. A thread that waits for a call also runs it.
  void while_waiting(std::function<bool()> progress) { progress_outside_ = std::move(progress); }

  /// Before the first call: one small text from every rank, [group rank].
  std::vector<std::string> introduce(std::string_view own, int64_t deadline_ns);

  /// In a task's body: one small text from every rank, [group rank]. `meanwhile` runs while they
  /// are on their way.
  std::vector<std::string> exchange(const Task& task, TcpControl::Frame frame, std::string_view own,
                                    const std::function<void()>& meanwhile = nullptr);

  /// Ends the thread and the connections. Calls that are not done fail.
  void shut_down() noexcept;

 private:
  // Tasks that happen one after the other, and the thread that makes them. A thread that waits for
  // the first of them makes it in that thread's stead: on a rank with one core, each change of
  // threads delays the call.
  struct Lane {
    std::deque<Task*> queue;  // owned by their callers
    bool busy = false;        // the front one is being made
    std::condition_variable changed;
    std::thread thread;
  };

  void push(Lane& lane, Task& task);
  void work(Lane& lane);
  void make_front(Lane& lane, std::unique_lock<std::mutex>& lock);
  std::vector<Fingerprint> agree_on(Task& task);
  void check(const Task& task, const TransportData::Outcome& outcome);

  [[noreturn]] void fail(const Task& task, const TcpControl::Trouble& trouble);
  [[noreturn]] void fail_late(const Task& task, std::vector<int> awaited);
  RankActivity activity();

  const BackendInfo& info_;
  std::vector<int> peers_;            // all group ranks but this one's
  std::string address_;               // of this rank, in digits
  std::unique_ptr<TcpControl> link_;  // null in a group of one
  ControlSession session_;
  SelfMessages own_messages_;
  std::unique_ptr<TransportData> data_;  // null in a group of one
  std::function<bool()> progress_outside_;

  std::mutex mutex_;              // guards what follows
  std::condition_variable done_;  // a task is
  Lane collectives_;
  std::map<int, Lane> sends_;     // [peer]
  std::map<int, Lane> receives_;  // [peer]
  bool stopping_ = false;
  std::list<RankActivity::Waiting> messages_;  // under way, of any thread
};

}  // namespace lockstep
