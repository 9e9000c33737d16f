#if LOCKSTEP_NCCL

#include "comm/gpu/nccl_watch.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "base/running_clock.hpp"
#include "lockstep/error.hpp"
#include "lockstep/units.hpp"
#include "net/quiet_thread.hpp"

namespace lockstep {
namespace {

constexpr auto kLookPeriod = std::chrono::milliseconds(5);

[[noreturn]] void throw_overdue(const Group& group, const NcclFlight& flight) {
  throw RankError(
      Code::kRankAbsent, -1,
      fmt::format("{}: all ranks came, but their GPUs did not finish within {}",
                  describe_in(group, flight.call),
                  format_seconds(static_cast<double>(flight.limit_ns) * 1e-9)),
      "see whether a rank's process or GPU hangs; where one only computes long, give it more time "
      "with --timeout of `lockstep run` or LOCKSTEP_TIMEOUT_S");
}

}  // namespace

NcclWatch::NcclWatch(int gpu, const Group& group, const NcclPeers& peers,
                     std::vector<NcclComm*> comms, Fail fail)
    : gpu_(gpu), group_(group), peers_(peers), comms_(std::move(comms)), fail_(std::move(fail)) {
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
  Flights ended;
  {
    const std::lock_guard lock(mutex_);
    new_flights_.push_back(std::move(flight));
    ended.swap(ended_);
  }
  changed_.notify_all();
}

void NcclWatch::work() {
  Flights flights;
  try {
    check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
    // Another thread may capture a graph, which must not be spoiled by what NCCL does here.
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
      set_aside_ended(flights);
      if (!flights.empty()) look_after_all(flights);
    }
  } catch (...) {
    fail_(std::current_exception());
  }
}

// See NcclProgress: from here on nothing is asked of CUDA before fail_.
void NcclWatch::set_aside_ended(Flights& flights) {
  const auto ended = std::stable_partition(flights.begin(), flights.end(), [](const auto& flight) {
    return !flight->progress->has_ended(flight->number);
  });
  const std::lock_guard lock(mutex_);
  ended_.insert(ended_.end(), std::move_iterator(ended), std::move_iterator(flights.end()));
  flights.erase(ended, flights.end());
}

void NcclWatch::look_after_all(const Flights& flights) const {
  peers_.blaming(flights.front()->call, [&] {
    for (NcclComm* comm : comms_) comm->check_health();
  });
  for (const auto& flight : flights) {
    peers_.blaming(flight->call, [&] { require_in_time(*flight); });
  }
}

void NcclWatch::require_in_time(NcclFlight& flight) const {
  const int64_t now_ns = running_ns();
  if (flight.started_ns == 0 && flight.progress->has_begun(flight.number)) {
    flight.started_ns = now_ns;
  }
  if (flight.started_ns != 0 && now_ns - flight.started_ns > flight.limit_ns) {
    throw_overdue(group_, flight);
  }
}

}  // namespace lockstep

#endif
