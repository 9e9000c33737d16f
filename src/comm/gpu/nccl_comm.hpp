#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>

// Of builds with NCCL only.

namespace lockstep {

/// Turns an ncclResult_t that is not success into an Error: kRankFailed where NCCL lost a peer,
/// kBackend otherwise.
void check_nccl(ncclResult_t result, ncclComm_t comm, std::string_view call);

/// One NCCL communicator. It never blocks: what NCCL still works on when a call returns is awaited
/// here, up to a deadline. Any thread may abort it meanwhile.
class NcclComm {
 public:
  /// Collective, on the current GPU; `id` is the one that rank 0 has made.
  NcclComm(const ncclUniqueId& id, int rank, int size, int64_t deadline_ns);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Makes an NCCL call, whose name is `what`, and waits until NCCL has queued its work.
  void run(std::string_view what, int64_t deadline_ns,
           const std::function<ncclResult_t(ncclComm_t)>& call);

  /// Throws what NCCL found out in the background, such as a lost connection.
  void check_health();

  /// Ends its kernels and frees it.
  void abort() noexcept;

 private:
  ncclResult_t state();
  void settle(std::string_view what, int64_t deadline_ns);

  std::mutex mutex_;  // guards comm_, which another thread may abort
  ncclComm_t comm_ = nullptr;
};

}  // namespace lockstep
