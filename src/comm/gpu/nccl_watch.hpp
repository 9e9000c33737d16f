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

namespace lockstep {

/// An NCCL call on its way through the GPU's streams.
struct NcclFlight {
  Call call;
  int64_t limit_ns = 0;    ///< from when its stream gets there to when it has ended
  GpuEvent ready;          ///< what it needs is there
  GpuEvent done;           ///< it has ended
  int64_t started_ns = 0;  ///< when the watch first saw it ready; 0: not yet
};

/// A thread that looks after calls that NCCL has queued: nobody on the host waits for them, and a
/// peer that died would keep them, and everything queued behind them, for ever.
class NcclWatch {
 public:
  using Fail = std::function<void(const std::exception_ptr&)>;

  /// `fail` is called from the thread, once, with the error of a call that does not end or of a
  /// communicator that lost a peer.
  NcclWatch(int gpu, const Group& group, std::vector<NcclComm*> comms, Fail fail);
  ~NcclWatch();
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  /// From now on until it is done. Both events are recorded.
  void follow(std::shared_ptr<NcclFlight> flight);

  /// No thread looks after the communicators any more.
  void stop() noexcept;

 private:
  void work();
  void look_after_all(std::vector<std::shared_ptr<NcclFlight>>& flights) const;

  const int gpu_;
  const Group group_;
  const std::vector<NcclComm*> comms_;
  const Fail fail_;
  std::mutex mutex_;  // guards the next three
  std::condition_variable changed_;
  std::vector<std::shared_ptr<NcclFlight>> new_flights_;
  bool stopping_ = false;
  std::thread thread_;  // last: uses all of the above
};

}  // namespace lockstep
