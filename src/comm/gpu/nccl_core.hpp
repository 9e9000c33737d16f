#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend.hpp"
#include "comm/fingerprint.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_runtime.hpp"
#include "comm/gpu/nccl_comm.hpp"
#include "comm/peer_process.hpp"

namespace lockstep {

/// The processes of the other ranks, as far as they are on this host: NCCL tells that a peer was
/// lost or that a call does not end, but not whose fault it is.
class NcclPeers {
 public:
  /// Collective over `host`. `over`: nobody needs to know any more.
  NcclPeers(Backend& host, int64_t deadline_ns, std::function<bool()> over);

  /// Does a part of `call`. If a peer has ended or is stopped, an error that blames nobody becomes
  /// that peer's.
  void blaming(const Fingerprint& call, const std::function<void()>& part) const;

 private:
  struct Peer {
    int group_rank;
    PeerProcess process;
  };

  void throw_ended(const Fingerprint& call) const;
  void throw_stopped(const Fingerprint& call) const;

  const Group group_;
  const std::function<bool()> over_;
  std::vector<Peer> peers_;
};

/// How far a stream has come through NCCL's calls. The stream itself writes it to the host's
/// memory, so that no thread has to ask CUDA: a thread that waits inside CUDA for the same stream
/// (a copy to pageable memory does) keeps all others out.
class NcclProgress {
 public:
  explicit NcclProgress(CudaStream stream);

  /// Queues a call between its two marks, and gives its number.
  uint32_t queue(const std::function<void()>& call);

  bool has_begun(uint32_t number) const { return has_reached(0, number); }
  bool has_ended(uint32_t number) const { return has_reached(1, number); }

 private:
  void mark(int word, uint32_t number) const;
  bool has_reached(int word, uint32_t number) const;

  CudaStream stream_;
  PinnedMemory words_;  // the latest call that has begun, and that has ended
  uint32_t number_ = 0;
};

/// An NCCL call on its way through the GPU's streams.
struct QueuedCall {
  Fingerprint call;
  int64_t limit_ns = 0;                    ///< from when its stream gets there to its end
  GpuEvent ready;                          ///< what it needs is there
  GpuEvent done;                           ///< it has ended
  const NcclProgress* progress = nullptr;  ///< of the stream it was queued on
  uint32_t number = 0;                     ///< there
  int64_t started_ns = 0;                  ///< when the watch first saw it begun; 0: not yet
};

/// A thread that watches the calls that NCCL has queued: no host thread waits for them, and a peer
/// that died would keep them, and everything queued behind them, for ever.
class NcclWatch {
 public:
  using Fail = std::function<void(const std::exception_ptr&)>;

  /// `fail` is called from the thread, once, with the error of a call that does not end or of a
  /// communicator that lost a peer.
  NcclWatch(int gpu, const Group& group, const NcclPeers& peers, std::vector<NcclComm*> comms,
            Fail fail);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  /// Watches a queued call until it is done.
  void follow(std::shared_ptr<QueuedCall> queued);

  /// Ends the thread.
  void stop() noexcept;

 private:
  using QueuedCalls = std::vector<std::shared_ptr<QueuedCall>>;

  void work();
  void set_aside_ended(QueuedCalls& calls);
  void look_after_all(const QueuedCalls& calls) const;
  void require_in_time(QueuedCall& queued) const;

  const int gpu_;
  const Group group_;
  const NcclPeers& peers_;
  const std::vector<NcclComm*> comms_;
  const Fail fail_;
  std::mutex mutex_;  // guards the next four
  std::condition_variable changed_;
  QueuedCalls new_calls_;
  QueuedCalls ended_;  // until follow() or the end, since the thread must not destroy events
  bool stopping_ = false;
  std::thread thread_;  // last: uses all of the above
};

/// One rank's part in a group over NCCL: collectives strictly in the order they were begun, each
/// after all ranks have exchanged fingerprints, on a stream of their own.
///
/// Note [Two NCCL communicators]
/// NCCL wants one order of all calls of a communicator on both ranks of a message, but messages and
/// collectives in flight have no order between them. So messages have a communicator and a
/// stream of their own.
class NcclCore {
 public:
  /// Channels of GpuControl: collectives, messages announced by senders, messages announced by
  /// receivers.
  static constexpr int kChannels = 3;

  /// What a collective does once all ranks agree: calls[rank].
  using Body =
      std::function<void(const NcclTransfer& transfer, std::span<const Fingerprint> calls)>;

  /// Checks what ranks exchanged in addition to their fingerprints.
  using Check = std::function<void(const GpuAgreement& agreement)>;

  /// A collective in flight.
  struct Task {
    std::shared_ptr<QueuedCall> queued;
    int64_t deadline_ns = 0;
    CudaStream stream = nullptr;  // of the caller
    std::unique_ptr<GpuAgreement> agreement;
    Check check;  // null: only fingerprints are exchanged
    Body body;    // null: nothing moves
    bool launched = false;
  };

  /// A message in flight. Both sides exchange fingerprints before data moves.
  struct MessageTask {
    std::shared_ptr<QueuedCall> queued;
    int64_t deadline_ns = 0;
    CudaStream stream = nullptr;  // of the caller
    NcclTransfer::Message message{};
    Fingerprint theirs;
    std::unique_ptr<Backend::Work> sent;
    std::unique_ptr<Backend::Work> received;
    bool launched = false;
  };

  /// Collective over the group of `control`. The current GPU is `gpu`.
  NcclCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns);
  ~NcclCore();
  NcclCore(const NcclCore&) = delete;
  NcclCore& operator=(const NcclCore&) = delete;

  const Group& group() const { return control_->group(); }
  int gpu() const { return gpu_; }

  /// `note`: what else the ranks must know of each other, for `check`.
  std::shared_ptr<Task> begin(const Fingerprint& what, const CallContext& context, Body body,
                              std::span<const std::byte> note = {}, Check check = nullptr);
  bool advance(const Task& task);  ///< true when it is launched
  void finish(const Task& task);   ///< waits for that, and orders the caller's stream after it

  void call(const Fingerprint& what, const CallContext& context, Body body) {
    finish(*begin(what, context, std::move(body)));
  }

  /// Messages are launched together with those that were begun before, as one group, once both
  /// sides of each have come: ranks that send to and receive from each other do not wait in turn.
  std::shared_ptr<MessageTask> begin_send(const ConstBuffer& buffer, int to, int tag,
                                          const CallContext& context);
  std::shared_ptr<MessageTask> begin_recv(const Buffer& buffer, int from, int tag,
                                          const CallContext& context);
  bool advance(const MessageTask& task);
  void finish(const MessageTask& task);
  GpuSelfMessages& own_messages() { return own_messages_; }

  /// The control of this rank's new group. Collective.
  std::unique_ptr<GpuControl> split(int color, int key, std::string_view group_name,
                                    const CallContext& context);

  ControlSession& session() { return control_->session(); }

  /// Does a part of a call on this rank's GPU. An exception ends the communicator.
  void guarded(const std::function<void()>& action);

 private:
  void launch_front();
  void queue_on(NcclProgress& progress, QueuedCall& queued,
                const std::function<void()>& part) const;
  void finish_queued() noexcept;
  std::shared_ptr<MessageTask> begin_message(const Fingerprint& own,
                                             const NcclTransfer::Message& message,
                                             const CallContext& context);
  void launch_messages();

  const int gpu_;
  std::unique_ptr<GpuControl> control_;
  std::atomic<bool> leaving_ = false;
  const NcclPeers peers_;
  GpuStream stream_;
  GpuStream message_stream_;
  NcclProgress progress_;  // of each of them
  NcclProgress message_progress_;
  std::optional<NcclComm> comm_;
  std::optional<NcclComm> messages_;  // none in a group of one
  GpuSelfMessages own_messages_;
  std::deque<std::shared_ptr<Task>> queue_;  // begun and not launched
  std::deque<std::shared_ptr<MessageTask>> message_queue_;
  std::optional<NcclWatch> watch_;  // last: uses all of the above
};

}  // namespace lockstep
