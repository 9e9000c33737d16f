#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_self_messages.hpp"
#include "comm/gpu/nccl_comm.hpp"
#include "comm/gpu/nccl_peers.hpp"
#include "comm/gpu/nccl_progress.hpp"
#include "comm/gpu/nccl_transfer.hpp"
#include "comm/gpu/nccl_watch.hpp"

namespace lockstep {

/// One rank's part in a group over NCCL: collectives strictly in the order they were begun, each
/// after all ranks have told each other what they call, on a stream of their own.
///
/// Note [Two NCCL communicators]
/// NCCL wants one order of all calls of a communicator on both ranks of a message, but messages and
/// collectives that are in flight have no order between them. So messages have a communicator and a
/// stream of their own.
class NcclCore {
 public:
  /// Of GpuControl: calls; messages as their senders tell them; and as their receivers do.
  static constexpr int kChannels = 3;

  /// What a collective does once all ranks agree: calls[place].
  using Body = std::function<void(const NcclTransfer& transfer, std::span<const Call> calls)>;

  /// A collective on its way.
  struct Task {
    std::shared_ptr<NcclFlight> flight;
    int64_t deadline_ns = 0;
    CudaStream stream = nullptr;  // of the caller
    std::unique_ptr<GpuAgreement> agreement;
    Body body;  // null: nothing moves
    bool launched = false;
  };

  /// Collective over the group of `control`. The current GPU is `gpu`.
  NcclCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns);
  ~NcclCore();
  NcclCore(const NcclCore&) = delete;
  NcclCore& operator=(const NcclCore&) = delete;

  const Group& group() const { return control_->group(); }
  int gpu() const { return gpu_; }

  std::shared_ptr<Task> begin(const Call& what, const CallContext& context, Body body);
  bool advance(const Task& task);  ///< true when it is launched
  void finish(const Task& task);   ///< waits for that, and orders the caller's stream after it

  void call(const Call& what, const CallContext& context, Body body) {
    finish(*begin(what, context, std::move(body)));
  }

  /// Waits for the other side: neither may move data before it knows what the other expects.
  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context);

  /// The control of this rank's new group. Collective.
  std::unique_ptr<GpuControl> split(int colour, int key, std::string_view group_name,
                                    const CallContext& context);

  void abort(std::string_view reason) noexcept { control_->abort(reason); }

 private:
  void guarded(const std::function<void()>& action);
  void launch_front();
  void queue_on(NcclProgress& progress, NcclFlight& flight,
                const std::function<void()>& part) const;
  void finish_queued() noexcept;
  void rendezvous(const Call& own, int peer, int64_t deadline_ns);
  void message(const Call& own, int peer, const CallContext& context,
               const std::function<void(const NcclTransfer&)>& move);

  const int gpu_;
  std::unique_ptr<GpuControl> control_;
  const NcclPeers peers_;
  GpuStream stream_;
  GpuStream message_stream_;
  NcclProgress progress_;  // of each of them
  NcclProgress message_progress_;
  std::optional<NcclComm> comm_;
  std::optional<NcclComm> messages_;  // none in a group of one
  GpuSelfMessages own_messages_;
  std::vector<int64_t> sent_;                // [place]
  std::vector<int64_t> received_;            // [place]
  std::deque<std::shared_ptr<Task>> queue_;  // begun and not launched
  std::optional<NcclWatch> watch_;           // last: uses all of the above
};

}  // namespace lockstep
