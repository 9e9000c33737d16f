#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_watch.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <iterator>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

constexpr auto kLookPeriod = std::chrono::milliseconds(5);

bool has_passed(const GpuEvent& event) {
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // an answer, not an error
    return false;
  }
  check_cuda(status, "cudaEventQuery");
  return true;
}

[[noreturn]] void throw_overdue(const Group& group, const NcclFlight& flight) {
  throw RankError(
      Code::kRankAbsent, -1,
      fmt::format("{}{}: all ranks came, but their GPUs did not finish within {}",
                  describe(flight.call),
                  group.name == "world" ? "" : fmt::format(" in group {}", group.name),
                  format_seconds(static_cast<double>(flight.limit_ns) * 1e-9)),
      "see whether a rank's process or GPU hangs; where one only computes long, give it more time "
      "with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S");
}

}  // namespace

NcclWatch::NcclWatch(int gpu, const Group& group, std::vector<NcclComm*> comms, Fail fail)
    : gpu_(gpu), group_(group), comms_(std::move(comms)), fail_(std::move(fail)) {
  thread_ = start_quiet_thread([this] { work(); });
}

NcclWatch::~NcclWatch() {
  stop();
}

void NcclWatch::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void NcclWatch::follow(std::shared_ptr<NcclFlight> flight) {
  {
    const std::lock_guard lock(mutex_);
    new_flights_.push_back(std::move(flight));
  }
  changed_.notify_all();
}

void NcclWatch::work() {
  std::vector<std::shared_ptr<NcclFlight>> flights;
  try {
    const GpuGuard on_gpu(gpu_);
    // Another thread may capture a graph, which must not be spoiled by questions asked here.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        const auto has_news = [&] { return stopping_ || !new_flights_.empty(); };
        if (flights.empty()) {
          changed_.wait(lock, has_news);
        } else {
          // One look in a period is enough, however many calls there are.
          changed_.wait_for(lock, kLookPeriod, [&] { return stopping_; });
        }
        if (stopping_) return;
        std::move(new_flights_.begin(), new_flights_.end(), std::back_inserter(flights));
        new_flights_.clear();
      }
      look_after_all(flights);
    }
  } catch (...) {
    fail_(std::current_exception());
  }
}

void NcclWatch::look_after_all(std::vector<std::shared_ptr<NcclFlight>>& flights) const {
  for (NcclComm* comm : comms_) comm->check_health();
  std::erase_if(flights, [](const auto& flight) { return has_passed(flight->done); });
  const int64_t now_ns = monotonic_ns();
  for (const auto& flight : flights) {
    if (flight->started_ns == 0 && has_passed(flight->ready)) flight->started_ns = now_ns;
    if (flight->started_ns != 0 && now_ns - flight->started_ns > flight->limit_ns) {
      throw_overdue(group_, *flight);
    }
  }
}

}  // namespace lockstep

#endif
