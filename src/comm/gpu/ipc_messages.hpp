#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_self_messages.hpp"
#include "comm/gpu/ipc_core.hpp"

namespace lockstep {

/// Messages between two ranks. The sender copies chunks into two slots of its own, in turn; the
/// receiver copies them out and says so. What is said travels over the host, in frames; each side
/// works in the order of its call's stream. The data of a small message travels there too, where
/// processes share a GPU: see IpcCarried for why.
class IpcMessages {
 public:
  explicit IpcMessages(IpcCore& core);
  ~IpcMessages();
  IpcMessages(const IpcMessages&) = delete;
  IpcMessages& operator=(const IpcMessages&) = delete;

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context);

  /// Memory is about to go: waits until all that was sent is taken, at most until the deadline of
  /// its send. The core's stream then waits for what messages have queued elsewhere.
  void drain() noexcept;

 private:
  struct Frame;
  struct Heard;

  // What this rank sends to one peer.
  struct Outgoing {
    int64_t messages = 0;
    int64_t sent = 0;   // chunks
    int64_t taken = 0;  // of them
    Call last;
    int64_t deadline_ns = 0;          // of the last message
    std::shared_ptr<IpcShare> slots;  // null until there is data to send
  };
  // What one peer sends to this rank.
  struct Incoming {
    int64_t messages = 0;
    std::shared_ptr<IpcShare> slots;  // the sender's; null until there was data
  };

  void send_chunk(Outgoing& out, int to, const Call& call, const std::byte* data, int64_t bytes,
                  const CallContext& context);
  void send_carried(int to, const Call& call, const std::byte* data, int64_t bytes,
                    const CallContext& context);
  void take_chunk(Incoming& in, int from, const Call& call, const Frame& frame, std::byte* data,
                  const CallContext& context);
  void await_taken(Outgoing& out, int to, const Call& why, int64_t deadline_ns);
  void say(int to, const Frame& frame, const Call& why, int64_t deadline_ns);
  void say_bytes(int to, std::span<const std::byte> bytes, const Call& why, int64_t deadline_ns);
  Heard hear(int from, int kind, const Call& why, int64_t deadline_ns);
  void hear_bytes(int from, std::span<std::byte> bytes, const Call& why, int64_t deadline_ns);

  IpcCore& core_;
  GpuSelfMessages own_;
  std::vector<Outgoing> outgoing_;        // [place]
  std::vector<Incoming> incoming_;        // [place]
  std::vector<std::deque<Heard>> heard_;  // [place]: came while another kind was awaited
  std::unique_ptr<PinnedMemory> down_;    // what is carried, on the host; null until it is needed
};

}  // namespace lockstep
