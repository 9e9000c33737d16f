#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/call.hpp"
#include "comm/gpu/gpu_runtime.hpp"
#include "comm/gpu/nccl_comm.hpp"
#include "comm/gpu/nccl_peers.hpp"
#include "comm/gpu/nccl_progress.hpp"

namespace lockstep {

/// An NCCL call on its way through the GPU's streams.
struct NcclFlight {
  Call call;
  int64_t limit_ns = 0;                    ///< from when its stream gets there to its end
  GpuEvent ready;                          ///< what it needs is there
  GpuEvent done;                           ///< it has ended
  const NcclProgress* progress = nullptr;  ///< of the stream it was queued on
  uint32_t number = 0;                     ///< there
  int64_t started_ns = 0;                  ///< when the watch first saw it begun; 0: not yet
};

/// A thread that looks after calls that NCCL has queued: nobody on the host waits for them, and a
/// peer that died would keep them, and everything queued behind them, for ever.
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

  /// From now on until it is done. It is queued.
  void follow(std::shared_ptr<NcclFlight> flight);

  /// No thread looks after the communicators any more.
  void stop() noexcept;

 private:
  using Flights = std::vector<std::shared_ptr<NcclFlight>>;

  void work();
  void set_aside_ended(Flights& flights);
  void look_after_all(const Flights& flights) const;
  void require_in_time(NcclFlight& flight) const;

  const int gpu_;
  const Group group_;
  const NcclPeers& peers_;
  const std::vector<NcclComm*> comms_;
  const Fail fail_;
  std::mutex mutex_;  // guards the next four
  std::condition_variable changed_;
  Flights new_flights_;
  Flights ended_;  // until follow() or the end, since the thread must not destroy events
  bool stopping_ = false;
  std::thread thread_;  // last: uses all of the above
};

}  // namespace lockstep
