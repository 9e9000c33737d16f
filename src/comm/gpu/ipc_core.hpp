#pragma once

#include <sys/types.h>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_runtime.hpp"
#include "comm/gpu/ipc_share.hpp"
#include "comm/peer_process.hpp"

namespace lockstep {

/// Tells, from a thread of its own, when a peer's process has ended. A stream may wait for that
/// peer's events while the program waits for the stream, and makes no call that would find out.
class IpcWatch {
 public:
  struct Peer {
    int group_rank = 0;
    PeerProcess process;
  };

  /// `died` is called once for each, and must not throw.
  IpcWatch(std::vector<Peer> peers, std::function<void(int group_rank)> died);
  ~IpcWatch();
  IpcWatch(const IpcWatch&) = delete;
  IpcWatch& operator=(const IpcWatch&) = delete;

 private:
  void watch();

  std::vector<Peer> peers_;
  std::function<void(int group_rank)> died_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

class IpcCollective;
class IpcMessages;

/// Memory that allocate() made. [rank] of `shares` is that rank's, this rank's own included.
struct IpcSegment {
  int64_t number = 0;  ///< counted from 1, the same on all ranks
  int64_t bytes = 0;
  std::vector<std::shared_ptr<IpcShare>> shares;
  std::shared_ptr<std::atomic<bool>> dropped;  ///< this rank's handle is gone
};

/// Where a rank's buffer lies for its peers; segment 0: where they cannot reach it.
struct IpcLocation {
  int64_t segment = 0;
  int64_t offset = 0;
};

/// One rank of one group on the GPU: the order of its calls, what it shares, and its end. Used by
/// one thread at a time.
///
/// Note [Events and handshakes]. A stream that waits for an event waits for the latest record that
/// was made before. So a rank may wait for a peer's event only after it heard from the peer, on the
/// host, that the record was made; and may record it again only after it heard that all have begun
/// to wait. Hearing is an exchange: whoever completes one knows that all have begun it, and so all
/// that they did before. Collectives are processed strictly in order, and each ends with an
/// exchange after which the core's stream waits for all that peers do with this rank's memory.
///
/// Channels of the control: calls are compared in the order of begin() on kCalls; all else happens
/// in the order of processing, on kSteps; kMessages and kTaken are for pairs.
class IpcCore {
 public:
  enum Channel { kCalls, kSteps, kMessages, kTaken, kChannels };

  /// Collective: the rendezvous of the ranks, who find out whether they reach each other.
  IpcCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns);
  ~IpcCore();
  IpcCore(const IpcCore&) = delete;
  IpcCore& operator=(const IpcCore&) = delete;

  GpuControl& control() { return *control_; }
  ControlSession& session() { return control_->session(); }
  const Group& group() const { return control_->group(); }
  bool in_flight() const { return !in_flight_.empty(); }  ///< collectives
  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }
  int gpu() const { return gpu_; }
  CudaStream stream() const { return resources_->stream.get(); }

  /// Whether all ranks use one GPU.
  bool one_gpu() const { return one_gpu_; }

  /// Whether a call that moves so many bytes goes through the host's memory; see IpcHostStaged.
  bool stages_on_host(int64_t bytes) const { return in_turns_ && bytes <= kHostStagedBytes; }
  static constexpr int64_t kHostStagedBytes = 4 << 20;

  // Collectives.

  void begin(const std::shared_ptr<IpcCollective>& task);
  bool advance(const IpcCollective& task);
  void wait(const IpcCollective& task);
  void run(const std::shared_ptr<IpcCollective>& task);

  // Messages and collectives of one rank go on together: a peer may need this rank's part in one
  // before it does what this rank waits for in the other.

  /// The messages of this communicator; null: none any more.
  void serve(IpcMessages* messages) { messages_ = messages; }
  /// Does what can be done without waiting, for all that is in flight. In guarded() only.
  void progress();
  /// Does so until `done`, which the parts in flight must come to or fail. Where `blocker` gives a
  /// call of the host, no message goes on before that call is over.
  void progress_until(const std::function<bool()>& done,
                      const std::function<Backend::Work*()>& blocker);

  /// The communicator is destroyed. Waits, for a short time, until no peer uses what it shares.
  void leave() noexcept;

  // For collectives: parts of a call that `why` and its deadline stand for.

  std::unique_ptr<GpuExchange> exchange(const Fingerprint& why, int64_t deadline_ns,
                                        std::span<const std::byte> own = {});
  /// All ranks' shares, from the handles that `handles` brought: [rank].
  std::vector<std::shared_ptr<IpcShare>> open(const GpuExchange& handles,
                                              const std::shared_ptr<IpcShare>& own, int events);

  /// Records that this rank's buffers are ready for call `sequence`.
  void record_ready(int64_t sequence, CudaStream stream) const;
  /// The core's stream waits for the buffers of all ranks, or of this one.
  void hold_all_ready(int64_t sequence) const;
  void hold_own_ready(int64_t sequence) const;
  /// Records that this rank has moved its part of a call that needs no staging; one at a time.
  void record_moved();
  void hold_all_moved() const;

  /// Tells when `receiver` has taken what `sender` had put into a slot for it. The receiver's own.
  const GpuEvent& message_taken(int receiver, int sender, int slot) const;
  static constexpr int kMessageSlots = 2;

  // The staging area: two slots, used in turn by the chunks of a call.

  static constexpr int64_t kSlotBytes = 32 << 20;
  static constexpr int kSlots = 2;
  bool has_staging() const { return !resources_->staging.empty(); }
  void set_staging(std::vector<std::shared_ptr<IpcShare>> staging);
  static std::shared_ptr<IpcShare> make_staging();
  static constexpr int kStagingEvents = 4;
  std::byte* slot(int group_rank, int64_t chunk) const;
  void record_staged(int64_t chunk) const;
  void hold_all_staged(int64_t chunk) const;
  void record_taken(int64_t chunk) const;
  void hold_all_taken(int64_t chunk) const;

  /// For one call after the other that goes through the host.
  struct HostArea {
    PinnedMemory memory{2 * kHostStagedBytes};
    GpuEvent free;  ///< the call before has no use of it any more
  };
  HostArea& host_area();

  // Memory that allocate() made.

  IpcLocation locate(const void* data, int64_t bytes) const;
  std::byte* address(int group_rank, const IpcLocation& where) const;
  std::vector<IpcSegment>& segments() { return resources_->segments; }
  int64_t next_segment() { return ++segment_count_; }

  /// A share that serves messages with this peer: kept as long as GPU work may use it.
  void keep_share(int group_rank, const std::shared_ptr<IpcShare>& share);

  /// Whether an event of this rank's streams was reached; kBackend after the deadline.
  static bool reached(const GpuEvent& event, const Fingerprint& why, int64_t deadline_ns);
  /// The host waits for it.
  static void await(const GpuEvent& event, const Fingerprint& why, int64_t deadline_ns);
  /// The host waits for the GPU: what was queued must be over before memory goes.
  void wait_until_idle(const Fingerprint& why, int64_t deadline_ns) const;

 private:
  // What GPU work may still use. Never freed if the stream waits for a dead rank.
  struct Resources {
    GpuStream stream;
    std::vector<std::shared_ptr<IpcShare>> events;   // [rank]
    std::vector<std::shared_ptr<IpcShare>> staging;  // [rank]; empty until it is needed
    std::vector<std::vector<std::shared_ptr<IpcShare>>> messages;  // [rank]
    std::vector<IpcSegment> segments;
    std::unique_ptr<HostArea> host_area;  // null until it is needed
  };

  void rendezvous(int64_t deadline_ns);
  void check_gpus_reach(const Fingerprint& why, int64_t deadline_ns);
  void progress_collectives();
  void complete(const IpcCollective& task);
  void failed(const std::exception_ptr& error) noexcept;
  void release_waits(int group_rank) noexcept;
  bool leave_together() noexcept;
  bool becomes_idle(int64_t deadline_ns) const;

  std::unique_ptr<GpuControl> control_;
  int gpu_;
  pid_t owner_;  // a forked child holds a copy, but the rank is not its own
  bool one_gpu_ = true;
  bool in_turns_ = false;  // some processes share a GPU
  bool left_ = false;
  std::unique_ptr<Resources> resources_;
  std::mutex shares_mutex_;          // the watch reads what resources_ shares
  std::unique_ptr<IpcWatch> watch_;  // null if all peers are threads of this process
  int64_t moved_ = 0;                // calls of record_moved()
  int64_t segment_count_ = 0;
  std::deque<std::shared_ptr<IpcCollective>> in_flight_;
  IpcMessages* messages_ = nullptr;
};

}  // namespace lockstep
