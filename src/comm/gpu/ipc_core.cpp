#include "comm/gpu/ipc_core.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>

#include "comm/gpu/ipc_collectives.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Of the share that every rank has: first kRing events of calls, then those of movements, then
// those of messages. A rank has at most kRing collectives in flight, so that the event of an old
// one is no longer used.
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

// Of the staging area, for the slot of a piece.
int staged_event(int64_t piece) {
  return static_cast<int>(piece % IpcCore::kSlots);
}

int taken_event(int64_t piece) {
  return IpcCore::kSlots + static_cast<int>(piece % IpcCore::kSlots);
}

}  // namespace

IpcCore::IpcCore(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
    : control_(std::move(control)), gpu_(gpu), owner_(::getpid()) {
  const GpuGuard guard(gpu_);
  things_ = std::make_unique<Things>();
  things_->messages.resize(static_cast<size_t>(size()));
  control_->on_failure([this](const std::exception_ptr& error) { failed(error); });
  control_->guarded([&] { meet(deadline_ns); });
}

IpcCore::~IpcCore() {
  leave();
}

void IpcCore::meet(int64_t deadline_ns) {
  Call why;
  why.operation = Operation::kSplit;
  why.set_label("ranks meet on the GPU");
  meet_gpus(why, deadline_ns);
  const int events = events_for(size());
  const auto own = IpcShare::make(0, events);
  const auto cards = exchange(why, deadline_ns, own->card());
  cards->wait();
  things_->events = open(*cards, own, events);
  exchange(why, deadline_ns)->wait();  // all have opened what may otherwise end with its owner
  std::vector<IpcWatch::Peer> peers;
  for (int place = 0; place < size(); ++place) {
    const IpcShare& share = *things_->events[static_cast<size_t>(place)];
    if (!share.opened()) continue;
    // It has just answered: a number that names no process is of another namespace.
    PeerProcess process(share.owner());
    if (!process.ended()) peers.push_back({place, std::move(process)});
  }
  if (peers.empty()) return;
  watch_ =
      std::make_unique<IpcWatch>(std::move(peers), [this](int place) { release_waits(place); });
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
  while (!in_flight_.empty() && in_flight_.front()->advance()) in_flight_.pop_front();
}

void IpcCore::complete(const IpcCollective& task) {
  while (!task.done()) {
    in_flight_.front()->wait();
    in_flight_.pop_front();
  }
}

// A peer may need this rank's part in a collective before it does what this rank blocks for, and
// the host's communicators have no call that only looks. So a thread blocks, and this one goes on.
void IpcCore::block(const std::function<void()>& wait) {
  if (in_flight_.empty()) return wait();
  auto blocked = std::async(std::launch::async, wait);
  try {
    while (blocked.wait_for(std::chrono::microseconds(50)) != std::future_status::ready) progress();
  } catch (const std::exception& error) {
    control_->channel(kMessages).abort(error.what());  // ends the wait
    blocked.wait();
    throw;
  }
  blocked.get();
}

std::unique_ptr<GpuExchange> IpcCore::exchange(const Call& why, int64_t deadline_ns,
                                               std::span<const std::byte> own) {
  return std::make_unique<GpuExchange>(control_->channel(kSteps), why, own, deadline_ns);
}

std::vector<std::shared_ptr<IpcShare>> IpcCore::open(const GpuExchange& cards,
                                                     const std::shared_ptr<IpcShare>& own,
                                                     int events) {
  std::vector<std::shared_ptr<IpcShare>> shares;
  for (int place = 0; place < size(); ++place) {
    shares.push_back(place == rank() ? own : IpcShare::open(cards.block(place), events));
  }
  return shares;
}

void IpcCore::record_ready(int64_t sequence, CudaStream stream) const {
  things_->events[static_cast<size_t>(rank())]->event(ready_event(sequence)).record(stream);
}

void IpcCore::hold_all_ready(int64_t sequence) const {
  for (const auto& share : things_->events) share->event(ready_event(sequence)).hold(stream());
}

void IpcCore::hold_own_ready(int64_t sequence) const {
  things_->events[static_cast<size_t>(rank())]->event(ready_event(sequence)).hold(stream());
}

void IpcCore::record_moved() {
  ++moved_;
  things_->events[static_cast<size_t>(rank())]->event(moved_event(moved_)).record(stream());
}

void IpcCore::hold_all_moved() const {
  for (const auto& share : things_->events) share->event(moved_event(moved_)).hold(stream());
}

const GpuEvent& IpcCore::message_taken(int receiver, int sender, int slot) const {
  return things_->events[static_cast<size_t>(receiver)]->event(kRing + kMovedEvents +
                                                               kMessageSlots * sender + slot);
}

std::shared_ptr<IpcShare> IpcCore::make_staging() {
  return IpcShare::make(kSlots * kSlotBytes, kStagingEvents);
}

IpcCore::HostArea& IpcCore::host_area() {
  if (!things_->host_area) things_->host_area = std::make_unique<HostArea>();
  return *things_->host_area;
}

void IpcCore::set_staging(std::vector<std::shared_ptr<IpcShare>> staging) {
  const std::lock_guard lock(shares_mutex_);
  things_->staging = std::move(staging);
}

std::byte* IpcCore::slot(int place, int64_t piece) const {
  return things_->staging[static_cast<size_t>(place)]->memory() + piece % kSlots * kSlotBytes;
}

void IpcCore::record_staged(int64_t piece) const {
  things_->staging[static_cast<size_t>(rank())]->event(staged_event(piece)).record(stream());
}

void IpcCore::hold_all_staged(int64_t piece) const {
  for (const auto& share : things_->staging) share->event(staged_event(piece)).hold(stream());
}

void IpcCore::record_taken(int64_t piece) const {
  things_->staging[static_cast<size_t>(rank())]->event(taken_event(piece)).record(stream());
}

void IpcCore::hold_all_taken(int64_t piece) const {
  for (const auto& share : things_->staging) share->event(taken_event(piece)).hold(stream());
}

IpcPlace IpcCore::locate(const void* data, int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const IpcSegment& segment : things_->segments) {
    const std::byte* memory = segment.shares[static_cast<size_t>(rank())]->memory();
    if (std::less<>()(begin, memory) || std::less<>()(memory + segment.bytes, begin + bytes)) {
      continue;
    }
    return {segment.number, begin - memory};
  }
  return {};
}

std::byte* IpcCore::address(int place, const IpcPlace& where) const {
  for (const IpcSegment& segment : things_->segments) {
    if (segment.number != where.segment) continue;
    return segment.shares[static_cast<size_t>(place)]->memory() + where.offset;
  }
  throw Error(Code::kInternal, fmt::format("segment {} is not mapped here", where.segment));
}

void IpcCore::keep_share(int place, const std::shared_ptr<IpcShare>& share) {
  const std::lock_guard lock(shares_mutex_);
  things_->messages[static_cast<size_t>(place)].push_back(share);
}

}  // namespace lockstep
