#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/ipc_core.hpp"

namespace lockstep {

/// Messages between two ranks. The sender copies chunks into two slots of its own, in turn; the
/// receiver copies them out and acknowledges them. A frame on the host goes with every chunk, and
/// each side works in the order of its call's stream. The data of a small message travels on the
/// host too, where processes share a GPU: see IpcHostStaged for why.
///
/// A message that was begun moves on whenever its rank waits or advances, in messages or in
/// collectives of this communicator, and, by Backend::while_waiting(), in calls of its host.
class IpcMessages final : public std::enable_shared_from_this<IpcMessages> {
 public:
  explicit IpcMessages(std::shared_ptr<IpcCore> core);
  ~IpcMessages();
  IpcMessages(const IpcMessages&) = delete;
  IpcMessages& operator=(const IpcMessages&) = delete;

  std::unique_ptr<Backend::Work> send(const ConstBuffer& buffer, int to, int tag,
                                      const CallContext& context);
  std::unique_ptr<Backend::Work> recv(const Buffer& buffer, int from, int tag,
                                      const CallContext& context);

  bool in_flight() const { return in_flight_ > 0; }

  /// Does what can be done without waiting, for all messages that were begun.
  void progress();

  /// Memory is about to go: waits until all that was sent is taken, at most until the deadline of
  /// its send. The core's stream then waits for what messages have queued elsewhere.
  void drain() noexcept;

 private:
  class Message;
  class Send;
  class Recv;
  class SelfRecv;
  struct Frame;
  using Queue = std::deque<Message*>;

  // What this rank sends to one peer.
  struct Outgoing {
    int64_t sent = 0;   // chunks
    int64_t taken = 0;  // of them
    Fingerprint last;
    int64_t deadline_ns = 0;          // of the last message
    std::shared_ptr<IpcShare> slots;  // null until there is data to send
    Queue queue;
  };
  // What one peer sends to this rank.
  struct Incoming {
    std::shared_ptr<IpcShare> slots;  // the sender's; null until there was data
    Queue queue;
  };

  std::unique_ptr<Backend::Work> begin(std::unique_ptr<Message> message);
  void advance(const Message& message);
  void wait(const Message& message);
  template <class Action>
  void awaiting(const Message* awaited, const Message& message, Action&& action);
  void drop(const Message& message) noexcept;
  void progress(Queue& queue);
  void wait_until_taken() noexcept;

  std::shared_ptr<IpcCore> core_;
  GpuSelfMessages own_;
  std::vector<Outgoing> outgoing_;                    // [rank]
  std::vector<Incoming> incoming_;                    // [rank]
  int64_t in_flight_ = 0;                             // in all queues
  const Message* awaited_ = nullptr;                  // by the caller
  std::vector<std::unique_ptr<PinnedMemory>> spare_;  // for what is staged on the host
};

}  // namespace lockstep
