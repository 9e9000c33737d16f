#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>

#include "base/process.hpp"
#include "base/running_clock.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "comm/gpu/ipc_messages.hpp"
#include "comm/peer_process.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

constexpr auto kLook = std::chrono::milliseconds(20);

// Spin first: short sleeps overshoot.
constexpr int kLooksAtOnce = 100;
constexpr auto kPollInterval = std::chrono::microseconds(20);

template <class Condition>
bool comes_true(const Condition& condition, int64_t deadline_ns) {
  for (int look = 0; !condition(); ++look) {
    if (running_ns() >= deadline_ns) return false;
    if (look >= kLooksAtOnce) std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

}  // namespace

IpcWatch::IpcWatch(std::vector<Peer> peers, std::function<void(int group_rank)> died)
    : peers_(std::move(peers)), died_(std::move(died)) {
  thread_ = start_quiet_thread([this] { watch(); });
}

IpcWatch::~IpcWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void IpcWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return stopping_; })) {
    std::erase_if(peers_, [this](const Peer& peer) {
      if (!peer.process.ended()) return false;
      died_(peer.group_rank);
      return true;
    });
  }
}

namespace {

// The events in the share of every rank: first kRing events of calls, then events of movements,
// then events of messages. A rank has at most kRing collectives in flight, so that the event of an
// old one is no longer used.
constexpr int kRing = 16;
constexpr int kMovedEvents = 2;

int events_for(int size) {
  return kRing + kMovedEvents + IpcCore::kMessageSlots * size;
}

int ready_event(int64_t sequence) {
  return static_cast<int>(sequence % kRing);
}

int moved_event(int64_t count) {
  return kRing + static_cast<int>(count % kMovedEvents);
}

// The event of the staging area for the slot of a chunk.
int staged_event(int64_t chunk) {
  return static_cast<int>(chunk % IpcCore::kSlots);
}

int taken_event(int64_t chunk) {
  return IpcCore::kSlots + static_cast<int>(chunk % IpcCore::kSlots);
}

}  // namespace

IpcCore::IpcCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
    : control_(std::move(control)), gpu_(gpu), owner_(::getpid()) {
  const GpuGuard guard(gpu_);
  resources_ = std::make_unique<Resources>();
  resources_->messages.resize(static_cast<size_t>(size()));
  session().on_failure([this](const std::exception_ptr& error) { failed(error); });
  control_->guarded([&] { rendezvous(deadline_ns); });
}

IpcCore::~IpcCore() {
  leave();
}

void IpcCore::rendezvous(int64_t deadline_ns) {
  Fingerprint why;
  why.operation = Operation::kSplit;
  why.set_label("rendezvous on the GPU");
  check_gpus_reach(why, deadline_ns);
  const int events = events_for(size());
  const auto own = IpcShare::make(0, events);
  const auto handles = exchange(why, deadline_ns, own->handle());
  handles->wait();
  resources_->events = open(*handles, own, events);
  exchange(why, deadline_ns)->wait();  // all have opened what may otherwise end with its owner
  std::vector<IpcWatch::Peer> peers;
  for (int group_rank = 0; group_rank < size(); ++group_rank) {
    const IpcShare& share = *resources_->events[static_cast<size_t>(group_rank)];
    if (!share.opened()) continue;
    // It has just answered: a number that names no process is of another namespace.
    PeerProcess process(share.owner());
    if (!process.ended()) peers.push_back({group_rank, std::move(process)});
  }
  if (peers.empty()) return;
  watch_ = std::make_unique<IpcWatch>(std::move(peers),
                                      [this](int group_rank) { release_waits(group_rank); });
}

void IpcCore::begin(const std::shared_ptr<IpcCollective>& task) {
  control_->guarded([&] {
    while (in_flight_.size() >= kRing) {
      const auto oldest = in_flight_.front();
      complete(*oldest);
    }
    task->begin();
    in_flight_.push_back(task);
  });
}

bool IpcCore::advance(const IpcCollective& task) {
  if (task.done()) return true;
  control_->guarded([&] { progress(); });
  return task.done();
}

void IpcCore::wait(const IpcCollective& task) {
  if (task.done()) return;
  control_->guarded([&] { complete(task); });
}

void IpcCore::run(const std::shared_ptr<IpcCollective>& task) {
  begin(task);
  wait(*task);
  task->hold_caller();
}

void IpcCore::progress() {
  progress_collectives();
  if (messages_ != nullptr) messages_->progress();
}

void IpcCore::progress_collectives() {
  while (!in_flight_.empty() && in_flight_.front()->advance()) in_flight_.pop_front();
}

void IpcCore::complete(const IpcCollective& task) {
  while (!task.done()) {
    if (messages_ != nullptr && messages_->in_flight()) {
      progress_until([&] { return task.done(); }, [] { return nullptr; });
    } else {
      in_flight_.front()->wait();
      in_flight_.pop_front();
    }
  }
}

void IpcCore::progress_until(const std::function<bool()>& done,
                             const std::function<Backend::Work*()>& blocker) {
  for (int look = 0;; ++look) {
    progress();
    if (done()) return;
    session().throw_if_broken();  // another thread of this rank may have ended it
    if (Backend::Work* work = in_flight_.empty() ? blocker() : nullptr) {
      work->wait();
    } else if (look >= kLooksAtOnce) {
      std::this_thread::sleep_for(look < 10 * kLooksAtOnce ? kPollInterval : 10 * kPollInterval);
    }
  }
}

std::unique_ptr<GpuExchange> IpcCore::exchange(const Fingerprint& why, int64_t deadline_ns,
                                               std::span<const std::byte> own) {
  return std::make_unique<GpuExchange>(control_->channel(kSteps), why, own, deadline_ns);
}

std::vector<std::shared_ptr<IpcShare>> IpcCore::open(const GpuExchange& handles,
                                                     const std::shared_ptr<IpcShare>& own,
                                                     int events) {
  std::vector<std::shared_ptr<IpcShare>> shares;
  for (int group_rank = 0; group_rank < size(); ++group_rank) {
    shares.push_back(group_rank == rank() ? own
                                          : IpcShare::open(handles.block(group_rank), events));
  }
  return shares;
}

void IpcCore::record_ready(int64_t sequence, CudaStream stream) const {
  resources_->events[static_cast<size_t>(rank())]->event(ready_event(sequence)).record(stream);
}

void IpcCore::hold_all_ready(int64_t sequence) const {
  for (const auto& share : resources_->events) share->event(ready_event(sequence)).hold(stream());
}

void IpcCore::hold_own_ready(int64_t sequence) const {
  resources_->events[static_cast<size_t>(rank())]->event(ready_event(sequence)).hold(stream());
}

void IpcCore::record_moved() {
  ++moved_;
  resources_->events[static_cast<size_t>(rank())]->event(moved_event(moved_)).record(stream());
}

void IpcCore::hold_all_moved() const {
  for (const auto& share : resources_->events) share->event(moved_event(moved_)).hold(stream());
}

const GpuEvent& IpcCore::message_taken(int receiver, int sender, int slot) const {
  return resources_->events[static_cast<size_t>(receiver)]->event(kRing + kMovedEvents +
                                                                  kMessageSlots * sender + slot);
}

std::shared_ptr<IpcShare> IpcCore::make_staging() {
  return IpcShare::make(kSlots * kSlotBytes, kStagingEvents);
}

IpcCore::HostArea& IpcCore::host_area() {
  if (!resources_->host_area) resources_->host_area = std::make_unique<HostArea>();
  return *resources_->host_area;
}

void IpcCore::set_staging(std::vector<std::shared_ptr<IpcShare>> staging) {
  const std::lock_guard lock(shares_mutex_);
  resources_->staging = std::move(staging);
}

std::byte* IpcCore::slot(int group_rank, int64_t chunk) const {
  return resources_->staging[static_cast<size_t>(group_rank)]->memory() +
         chunk % kSlots * kSlotBytes;
}

void IpcCore::record_staged(int64_t chunk) const {
  resources_->staging[static_cast<size_t>(rank())]->event(staged_event(chunk)).record(stream());
}

void IpcCore::hold_all_staged(int64_t chunk) const {
  for (const auto& share : resources_->staging) share->event(staged_event(chunk)).hold(stream());
}

void IpcCore::record_taken(int64_t chunk) const {
  resources_->staging[static_cast<size_t>(rank())]->event(taken_event(chunk)).record(stream());
}

void IpcCore::hold_all_taken(int64_t chunk) const {
  for (const auto& share : resources_->staging) share->event(taken_event(chunk)).hold(stream());
}

IpcLocation IpcCore::locate(const void* data, int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const IpcSegment& segment : resources_->segments) {
    const std::byte* memory = segment.shares[static_cast<size_t>(rank())]->memory();
    if (std::less<>()(begin, memory) || std::less<>()(memory + segment.bytes, begin + bytes)) {
      continue;
    }
    return {segment.number, begin - memory};
  }
  return {};
}

std::byte* IpcCore::address(int group_rank, const IpcLocation& where) const {
  for (const IpcSegment& segment : resources_->segments) {
    if (segment.number != where.segment) continue;
    return segment.shares[static_cast<size_t>(group_rank)]->memory() + where.offset;
  }
  throw Error(Code::kInternal, fmt::format("segment {} is not mapped here", where.segment));
}

void IpcCore::keep_share(int group_rank, const std::shared_ptr<IpcShare>& share) {
  const std::lock_guard lock(shares_mutex_);
  resources_->messages[static_cast<size_t>(group_rank)].push_back(share);
}

// How a rank's communicator on the GPU begins to work with its peers' GPUs, and how it ends: in
// order, by an error, or by a peer's death.

namespace {

constexpr int64_t kLeaveTogetherNs = 2'000'000'000;   // for peers to leave too
constexpr int64_t kPatienceNs = 30'000'000'000;       // for queued work to end
constexpr int64_t kBrokenPatienceNs = 1'000'000'000;  // where it may wait for a dead rank

}  // namespace

// The streams' waits for a rank that died would never end: whoever opened an event may record it.
// Where CUDA refuses, those streams are left behind in the end. From the watch's thread too.
void IpcCore::release_waits(int group_rank) noexcept {
  const auto at = static_cast<size_t>(group_rank);
  try {
    std::vector<std::shared_ptr<IpcShare>> shares;
    {
      const std::lock_guard lock(shares_mutex_);
      if (at < resources_->events.size()) shares.push_back(resources_->events[at]);
      if (at < resources_->staging.size()) shares.push_back(resources_->staging[at]);
      for (const auto& share : resources_->messages[at]) shares.push_back(share);
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

// Queued work may still use the buffers of calls that will not be done: whoever frees them does
// so in the order of the calls' streams, which therefore wait for it.
void IpcCore::failed(const std::exception_ptr& error) noexcept {
  if (!resources_) return;
  try {
    const GpuGuard guard(gpu_);
    try {
      std::rethrow_exception(error);
    } catch (const RankError& failure) {
      const int blamed = group().group_rank(failure.blamed_rank());
      if (failure.code() == Code::kRankFailed && blamed >= 0) release_waits(blamed);
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
    (void)resources_.release();
    (void)watch_.release();
    return;
  }
  try {
    const GpuGuard guard(gpu_);
    if (std::uncaught_exceptions() > 0) {
      session().abort("failed with an exception");
    } else if (!in_flight_.empty() || (messages_ != nullptr && messages_->in_flight())) {
      session().abort("destroyed its communicator while calls were in flight");
    }
    const bool in_order = !control_->broken() && leave_together();
    if (resources_->host_area) resources_->host_area->free.hold(stream());
    const bool idle = becomes_idle(running_ns() + (in_order ? kPatienceNs : kBrokenPatienceNs));
    watch_.reset();
    if (idle) resources_.reset();
  } catch (const std::exception&) {
    // The GPU itself has failed; nothing can be freed there.
  }
  watch_.reset();
  for (int channel = 0; channel < kChannels; ++channel) control_->close(channel);
  (void)resources_.release();  // where it is still here, its stream waits for what will never come
}

bool IpcCore::becomes_idle(int64_t deadline_ns) const {
  return comes_true([this] { return resources_->stream.idle(); }, deadline_ns);
}

bool IpcCore::reached(const GpuEvent& event, const Fingerprint& why, int64_t deadline_ns) {
  if (event.reached()) return true;
  if (running_ns() < deadline_ns) return false;
  throw Error(Code::kBackend,
              describe(why) + ": the GPU did not finish what was queued before it in time",
              "look for a kernel that does not end on some rank");
}

void IpcCore::await(const GpuEvent& event, const Fingerprint& why, int64_t deadline_ns) {
  comes_true([&] { return reached(event, why, deadline_ns); }, INT64_MAX);
}

void IpcCore::wait_until_idle(const Fingerprint& why, int64_t deadline_ns) const {
  const GpuEvent last;
  last.record(stream());
  await(last, why, deadline_ns);
}

// A peer in another process may only now begin to wait for an event of the last call: what it waits
// for stays until it has. Ranks that call this one learn at once that it has left. Returns false if
// a peer did not answer.
bool IpcCore::leave_together() noexcept {
  const auto opened = [](const auto& share) { return share->opened(); };
  if (std::none_of(resources_->events.begin(), resources_->events.end(), opened)) return true;
  control_->close(kCalls);
  control_->close(kMessages);
  control_->close(kTaken);
  try {
    Fingerprint why;
    why.set_label("leave");
    exchange(why, running_ns() + kLeaveTogetherNs)->wait();
    return true;
  } catch (const std::exception&) {
    failed(std::current_exception());
    return false;
  }
}

// Whether every GPU reaches every other one, before anything is shared.
void IpcCore::check_gpus_reach(const Fingerprint& why, int64_t deadline_ns) {
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
  for (int group_rank = 0; group_rank < size(); ++group_rank) {
    std::memcpy(&all[static_cast<size_t>(group_rank)], homes->block(group_rank).data(),
                sizeof(Home));
  }
  for (const Home& one : all) {
    in_turns_ =
        in_turns_ || std::any_of(all.begin(), all.end(), [&](const Home& other) {
          return std::string_view(one.bus_id) == other.bus_id &&
                 (one.process.pid != other.process.pid || !one.process.numbers_as(other.process));
        });
  }
  for (int group_rank = 0; group_rank < size(); ++group_rank) {
    const Home& theirs = all[static_cast<size_t>(group_rank)];
    const int world_rank = group().world_ranks[static_cast<size_t>(group_rank)];
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
