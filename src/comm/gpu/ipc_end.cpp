// How a rank's communicator on the GPU begins to work with its peers' GPUs, and how it ends: in
// order, by an error, or by a peer's death.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/running_clock.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "comm/shm/shm_peers.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kGoodbyeNs = 2'000'000'000;         // for peers to leave too
constexpr int64_t kPatienceNs = 30'000'000'000;       // for queued work to end
constexpr int64_t kBrokenPatienceNs = 1'000'000'000;  // where it may wait for a dead rank

// A nap costs more than it says: the first looks follow each other.
constexpr int kLooksAtOnce = 100;
constexpr auto kNap = std::chrono::microseconds(20);

template <class Condition>
bool comes_true(const Condition& condition, int64_t deadline_ns) {
  for (int look = 0; !condition(); ++look) {
    if (running_ns() >= deadline_ns) return false;
    if (look >= kLooksAtOnce) std::this_thread::sleep_for(kNap);
  }
  return true;
}

}  // namespace

// The streams' waits for a rank that died would never end: whoever opened an event may record it.
// Where CUDA refuses, those streams are left behind in the end. From the watch's thread too.
void IpcCore::release_waits(int place) noexcept {
  const auto at = static_cast<size_t>(place);
  try {
    std::vector<std::shared_ptr<IpcShare>> shares;
    {
      const std::lock_guard lock(shares_mutex_);
      if (at < things_->events.size()) shares.push_back(things_->events[at]);
      if (at < things_->staging.size()) shares.push_back(things_->staging[at]);
      for (const auto& share : things_->messages[at]) shares.push_back(share);
    }
    const GpuGuard guard(gpu_);
    const GpuStream free_stream;
    for (const auto& share : shares) {
      if (!share->opened()) continue;
      for (const GpuEvent& event : share->events()) {
        if (cudaEventRecord(event.get(), free_stream.get()) != cudaSuccess)
          (void)cudaGetLastError();
      }
    }
  } catch (const std::exception&) {
    // Nothing else can be done for them.
  }
}

// What is queued may still use the buffers of calls that will not be done: whoever frees them does
// so in the order of the calls' streams, which therefore wait for it.
void IpcCore::failed(const std::exception_ptr& error) noexcept {
  if (!things_) return;
  try {
    const GpuGuard guard(gpu_);
    try {
      std::rethrow_exception(error);
    } catch (const RankError& failure) {
      const auto& ranks = group().world_ranks;
      const auto found = std::find(ranks.begin(), ranks.end(), failure.blamed_rank());
      if (failure.code() == Code::kRankFailed && found != ranks.end()) {
        release_waits(static_cast<int>(found - ranks.begin()));
      }
    } catch (...) {
      // No rank has died.
    }
    const GpuEvent last;
    last.record(stream());
    for (const auto& task : in_flight_) last.hold(task->caller_stream());
  } catch (const std::exception&) {
    // The GPU itself has failed: nothing runs there any more.
  }
  in_flight_.clear();
}

void IpcCore::leave() noexcept {
  if (left_) return;
  left_ = true;
  if (owner_ != ::getpid()) {
    (void)things_.release();
    (void)watch_.release();
    return;
  }
  try {
    const GpuGuard guard(gpu_);
    if (std::uncaught_exceptions() > 0) {
      abort("failed with an exception");
    } else if (!in_flight_.empty()) {
      abort("destroyed its communicator while calls were in flight");
    }
    const bool in_order = !control_->broken() && say_goodbye();
    if (things_->host_area) things_->host_area->free.hold(stream());
    const bool idle = becomes_idle(running_ns() + (in_order ? kPatienceNs : kBrokenPatienceNs));
    watch_.reset();
    if (idle) things_.reset();
  } catch (const std::exception&) {
    // The GPU itself has failed; nothing can be freed there.
  }
  watch_.reset();
  for (int channel = 0; channel < kChannels; ++channel) control_->close(channel);
  (void)things_.release();  // where it is still here, its stream waits for what will never come
}

bool IpcCore::becomes_idle(int64_t deadline_ns) const {
  return comes_true([this] { return things_->stream.idle(); }, deadline_ns);
}

void IpcCore::await(const GpuEvent& event, const Call& why, int64_t deadline_ns) const {
  if (comes_true([&] { return event.reached(); }, deadline_ns)) return;
  throw Error(Code::kBackend,
              describe(why) + ": the GPU did not finish what was queued before it in time",
              "look for a kernel that does not end on some rank");
}

void IpcCore::wait_until_idle(const Call& why, int64_t deadline_ns) const {
  const GpuEvent last;
  last.record(stream());
  await(last, why, deadline_ns);
}

// A peer in another process may only now begin to wait for an event of the last call: what it waits
// for stays until it has. Those who call this rank hear at once that it has left. False: a peer did
// not answer.
bool IpcCore::say_goodbye() noexcept {
  const auto opened = [](const auto& share) { return share->opened(); };
  if (std::none_of(things_->events.begin(), things_->events.end(), opened)) return true;
  control_->close(kCalls);
  control_->close(kMessages);
  try {
    Call why;
    why.set_label("goodbye");
    exchange(why, running_ns() + kGoodbyeNs)->wait();
    return true;
  } catch (const std::exception&) {
    failed(std::current_exception());
    return false;
  }
}

// Whether every GPU reaches every other one, before anything is shared.
void IpcCore::meet_gpus(const Call& why, int64_t deadline_ns) {
  struct Home {
    ProcessHome process;
    char bus_id[32] = {};  // of the GPU
  };
  Home own;
  own.process = ProcessHome::own();
  check_cuda(cudaDeviceGetPCIBusId(own.bus_id, sizeof own.bus_id, gpu_), "cudaDeviceGetPCIBusId");
  const auto homes = exchange(why, deadline_ns, std::as_bytes(std::span(&own, 1)));
  homes->wait();
  std::vector<Home> all(static_cast<size_t>(size()));
  for (int place = 0; place < size(); ++place) {
    std::memcpy(&all[static_cast<size_t>(place)], homes->block(place).data(), sizeof(Home));
  }
  for (const Home& one : all) {
    in_turns_ =
        in_turns_ || std::any_of(all.begin(), all.end(), [&](const Home& other) {
          return std::string_view(one.bus_id) == other.bus_id &&
                 (one.process.pid != other.process.pid || !one.process.numbers_as(other.process));
        });
  }
  for (int place = 0; place < size(); ++place) {
    const Home& theirs = all[static_cast<size_t>(place)];
    const int world_rank = group().world_ranks[static_cast<size_t>(place)];
    if (theirs.process.kernel != own.process.kernel) {
      throw Error(Code::kBackend, fmt::format("rank {} is on another host", world_rank),
                  "ipc is for ranks of one host: use --backend nccl with a GPU for each rank");
    }
    if (std::string_view(theirs.bus_id) == own.bus_id) continue;
    one_gpu_ = false;
    int other = 0;
    if (cudaDeviceGetByPCIBusId(&other, theirs.bus_id) != cudaSuccess) {
      (void)cudaGetLastError();  // hidden from this process: whether it is reached shows later
      continue;
    }
    int reached = 0;
    check_cuda(cudaDeviceCanAccessPeer(&reached, gpu_, other), "cudaDeviceCanAccessPeer");
    if (reached == 0) {
      throw Error(Code::kBackend,
                  fmt::format("GPU {} cannot reach the memory of GPU {} of rank {}", own.bus_id,
                              theirs.bus_id, world_rank),
                  "use --backend nccl, one GPU for all ranks, or --backend shm, which goes through "
                  "the host's memory");
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      check_cuda(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

}  // namespace lockstep
