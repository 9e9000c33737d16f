#include "comm/shm/shm_sharing.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/make_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// This rank's part of a segment. The last handle of the last rank lets all ranks unmap it.
class ShmMemory final : public ReachableMemory {
 public:
  ShmMemory(const ShmControl& control, std::shared_ptr<Mapping> segment,
            std::atomic<int32_t>& dropped, std::byte* data, int64_t bytes)
      : control_(control),
        segment_(std::move(segment)),
        dropped_(dropped),
        data_(data),
        bytes_(bytes),
        owner_(::getpid()) {}
  ~ShmMemory() override {
    if (owner_ != ::getpid()) return;  // a forked child's copy is no handle
    if (dropped_.fetch_add(1, std::memory_order_acq_rel) + 1 == control_.size()) {
      control_.dropped_segments().fetch_add(1, std::memory_order_acq_rel);
    }
  }
  ShmMemory(const ShmMemory&) = delete;
  ShmMemory& operator=(const ShmMemory&) = delete;

  void* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  ShmControl control_;  // a copy, since the memory may outlive its communicator
  std::shared_ptr<Mapping> segment_;
  std::atomic<int32_t>& dropped_;
  std::byte* data_;
  int64_t bytes_;
  pid_t owner_;
};

}  // namespace

ShmHandout::ShmHandout(ShmEngine& engine, const Call& what, const CallContext& context,
                       MessageKind kind)
    : ShmCollective(engine, what, context), kind_(kind) {}

bool ShmHandout::move() {
  if (!received_) received_ = engine_.rank() == 0 ? hand_out() : look_for_message();
  return received_ && settle();
}

std::vector<int> ShmHandout::awaited_to_move() const {
  return received_ ? awaited_to_settle() : std::vector<int>{0};
}

bool ShmHandout::hand_out() {
  std::vector<std::vector<OwnedDescriptor>> parcels = make();
  const auto& members = engine_.membership().members;
  for (size_t place = 1; place < parcels.size(); ++place) {
    std::vector<int> descriptors;
    for (const auto& descriptor : parcels[place]) descriptors.push_back(descriptor->get());
    // Where a member is gone, those who wait for it will find out.
    send_message(members[place]->get(), kind_, {call.sequence}, "", descriptors);
  }
  engine_.control().wake();
  receive(std::move(parcels[0]));
  return true;
}

bool ShmHandout::look_for_message() {
  SocketMessage message;
  if (receive_message(engine_.membership().leader->get(), message) != Received::kMessage) {
    return false;
  }
  if (message.kind != kind_ || message.numbers != std::vector<int64_t>{call.sequence} ||
      message.descriptors.empty()) {
    throw Error(Code::kInternal, describe(call) + ": an unexpected message from the leader");
  }
  receive(std::move(message.descriptors));
  return true;
}

ShmAllocate::ShmAllocate(ShmEngine& engine, int64_t bytes, const CallContext& context)
    : ShmHandout(engine, make_call(Operation::kAllocate, Dtype::kU8, bytes), context,
                 MessageKind::kSegment),
      bytes_(bytes),
      part_bytes_(round_up(std::max<int64_t>(bytes, 1), page_bytes())) {}

std::vector<std::vector<OwnedDescriptor>> ShmAllocate::make() {
  const OwnedDescriptor file = make_memory_file(
      "lockstep-segment", engine_.size() * part_bytes_ + page_bytes());  // a page for the count
  reserve_memory(file->get(), engine_.size() * part_bytes_, page_bytes(), "shared memory");
  std::vector<std::vector<OwnedDescriptor>> parcels(static_cast<size_t>(engine_.size()));
  for (auto& parcel : parcels) {
    parcel.push_back(std::make_unique<Descriptor>(::fcntl(file->get(), F_DUPFD_CLOEXEC, 0)));
  }
  return parcels;
}

void ShmAllocate::receive(std::vector<OwnedDescriptor> descriptors) {
  ShmEngine::Segment segment;
  segment.number = call.sequence;
  segment.mapping = engine_.membership().pool->map(std::move(descriptors.at(0)));
  segment.data_bytes = engine_.size() * part_bytes_;
  segment.dropped =
      reinterpret_cast<std::atomic<int32_t>*>(segment.mapping->data() + segment.data_bytes);
  const int64_t offset = engine_.rank() * part_bytes_;
  reserve_memory(segment.mapping->file(), offset, part_bytes_, "shared memory");
  engine_.add_segment(segment);
  mapping_ = segment.mapping;
  memory_ = std::make_shared<ShmMemory>(engine_.control(), segment.mapping, *segment.dropped,
                                        segment.mapping->data() + offset, bytes_);
  piece_ = engine_.take_pieces(1);
  const ShmControl& control = engine_.control();
  control.announce(control.rank(engine_.rank()).consumed, piece_ + 1);
}

// Memory is there only when every rank has reserved its part.
bool ShmAllocate::settle() {
  if (!engine_.all_reached(&RankControl::consumed, piece_ + 1)) return false;
  mapping_->populate(0, engine_.size() * part_bytes_);
  return true;
}

std::vector<int> ShmAllocate::awaited_to_settle() const {
  return engine_.behind(&RankControl::consumed, piece_ + 1);
}

ShmSplit::ShmSplit(ShmEngine& engine, int colour, int key, std::string_view group_name,
                   const CallContext& context)
    : ShmHandout(engine, make_call(Operation::kSplit, Dtype::kU8, 0), context, MessageKind::kChild),
      wish_{colour, key},
      group_name_(group_name) {}

void ShmSplit::publish(RingCall& own) {
  std::memcpy(own.payload, &wish_, sizeof wish_);
}

ShmSplit::Wish ShmSplit::wish_of(int place) const {
  Wish wish{};
  std::memcpy(&wish, engine_.ring_call(place, call.sequence).payload, sizeof wish);
  return wish;
}

// Places in the parent, in the child's order.
std::vector<int> ShmSplit::members_of(int64_t colour) const {
  std::vector<int> places;
  for (int place = 0; place < engine_.size(); ++place) {
    if (wish_of(place).colour == colour) places.push_back(place);
  }
  std::stable_sort(places.begin(), places.end(),
                   [this](int a, int b) { return wish_of(a).key < wish_of(b).key; });
  return places;
}

// The child's control block first; then its leader's connections to the members, by their place, or
// a member's to the leader.
std::vector<std::vector<OwnedDescriptor>> ShmSplit::make() {
  std::vector<std::vector<OwnedDescriptor>> parcels(static_cast<size_t>(engine_.size()));
  for (int first = 0; first < engine_.size(); ++first) {
    if (!parcels[static_cast<size_t>(first)].empty()) continue;  // of a colour already seen
    const std::vector<int> places = members_of(wish_of(first).colour);
    const OwnedDescriptor control = ShmControl::make(static_cast<int>(places.size()));
    for (const int place : places) {
      parcels[static_cast<size_t>(place)].push_back(
          std::make_unique<Descriptor>(::fcntl(control->get(), F_DUPFD_CLOEXEC, 0)));
    }
    for (size_t member = 1; member < places.size(); ++member) {
      auto [leader_end, member_end] = make_socket_pair();
      parcels[static_cast<size_t>(places[0])].push_back(std::move(leader_end));
      parcels[static_cast<size_t>(places[member])].push_back(std::move(member_end));
    }
  }
  return parcels;
}

void ShmSplit::receive(std::vector<OwnedDescriptor> descriptors) {
  ShmMembership& parent = engine_.membership();
  ShmMembership child;
  child.group.name = group_name_;
  for (const int place : members_of(wish_.colour)) {
    if (place == engine_.rank()) child.group.rank = child.group.size();
    child.group.world_ranks.push_back(parent.group.world_ranks[static_cast<size_t>(place)]);
    child.processes.push_back(parent.processes[static_cast<size_t>(place)]);
  }
  child.pool = parent.pool;
  child.control = child.pool->map(std::move(descriptors.at(0)));
  if (child.group.rank == 0) {
    child.members = std::move(descriptors);  // [0], the control block, is gone by now
  } else {
    child.leader = std::move(descriptors.at(1));
  }
  membership_ = std::move(child);
}

}  // namespace lockstep
