#include "comm/shm/shm_sharing.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/arguments.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// This rank's part of a segment. The last handle of the last rank lets all ranks unmap it.
class ShmMemory final : public RegisteredMemory {
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

LeaderBroadcast::LeaderBroadcast(ShmEngine& engine, const Fingerprint& what,
                                 const CallContext& context, MessageKind kind)
    : ShmCollective(engine, what, context), kind_(kind) {}

bool LeaderBroadcast::move() {
  if (!received_) received_ = engine_.rank() == 0 ? send_to_members() : look_for_message();
  return received_ && settle();
}

std::vector<int> LeaderBroadcast::awaited_to_move() const {
  return received_ ? awaited_to_settle() : std::vector<int>{0};
}

bool LeaderBroadcast::send_to_members() {
  std::vector<std::vector<OwnedDescriptor>> messages = make();
  const auto& members = engine_.membership().members;
  for (size_t peer = 1; peer < messages.size(); ++peer) {
    std::vector<int> descriptors;
    for (const auto& descriptor : messages[peer]) descriptors.push_back(descriptor->get());
    // If a member is gone, the ranks that wait for it will find out.
    send_message(members[peer]->get(), kind_, {call.sequence}, "", descriptors);
  }
  engine_.control().wake();
  receive(std::move(messages[0]));
  return true;
}

bool LeaderBroadcast::look_for_message() {
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

ShmAllocate::ShmAllocate(ShmEngine& engine, int64_t bytes, Kind kind, const CallContext& context)
    : LeaderBroadcast(engine,
                      make_fingerprint(kind == Kind::kOneForAll ? Operation::kAllocateShared
                                                                : Operation::kAllocate,
                                       Dtype::kU8, bytes),
                      context, MessageKind::kSegment),
      bytes_(bytes),
      part_bytes_(round_up(std::max<int64_t>(bytes, 1), page_bytes())),
      parts_(kind == Kind::kOneForAll ? 1 : engine.size()) {}

std::vector<std::vector<OwnedDescriptor>> ShmAllocate::make() {
  const OwnedDescriptor file = make_memory_file(
      "lockstep-segment", parts_ * part_bytes_ + page_bytes());  // a page for the count
  reserve_memory(file->get(), parts_ * part_bytes_, page_bytes(), "shared memory");
  std::vector<std::vector<OwnedDescriptor>> messages(static_cast<size_t>(engine_.size()));
  for (auto& message : messages) {
    message.push_back(std::make_unique<Descriptor>(::fcntl(file->get(), F_DUPFD_CLOEXEC, 0)));
  }
  return messages;
}

void ShmAllocate::receive(std::vector<OwnedDescriptor> descriptors) {
  ShmEngine::Segment segment;
  segment.number = call.sequence;
  segment.mapping = engine_.membership().pool->map(std::move(descriptors.at(0)));
  segment.data_bytes = parts_ * part_bytes_;
  segment.dropped =
      reinterpret_cast<std::atomic<int32_t>*>(segment.mapping->data() + segment.data_bytes);
  const int64_t offset = parts_ == 1 ? 0 : engine_.rank() * part_bytes_;
  reserve_own(*segment.mapping);
  engine_.add_segment(segment);
  mapping_ = segment.mapping;
  memory_ = std::make_shared<ShmMemory>(engine_.control(), segment.mapping, *segment.dropped,
                                        segment.mapping->data() + offset, bytes_);
  chunk_ = engine_.take_chunks(1);
  const ShmControl& control = engine_.control();
  control.announce(control.rank(engine_.rank()).consumed, chunk_ + 1);
}

// Each rank reserves its share of the pages of common memory, so that these lie on all memory nodes
// of a machine that has several.
void ShmAllocate::reserve_own(const Mapping& mapping) const {
  const int64_t pages = parts_ * part_bytes_ / page_bytes();
  const int64_t begin = engine_.rank() * pages / engine_.size() * page_bytes();
  const int64_t end = (engine_.rank() + 1) * pages / engine_.size() * page_bytes();
  reserve_memory(mapping.file(), begin, end - begin, "shared memory");
}

// Memory is there only when every rank has reserved its part.
bool ShmAllocate::settle() {
  if (!engine_.all_reached(&RankControl::consumed, chunk_ + 1)) return false;
  mapping_->populate(0, parts_ * part_bytes_);
  return true;
}

std::vector<int> ShmAllocate::awaited_to_settle() const {
  return engine_.behind(&RankControl::consumed, chunk_ + 1);
}

ShmSplit::ShmSplit(ShmEngine& engine, int color, int key, std::string_view group_name,
                   const CallContext& context)
    : LeaderBroadcast(engine, make_fingerprint(Operation::kSplit, Dtype::kU8, 0), context,
                      MessageKind::kChild),
      color_and_key_{color, key},
      group_name_(group_name) {}

void ShmSplit::publish(RingEntry& own) {
  std::memcpy(own.payload, &color_and_key_, sizeof color_and_key_);
}

ShmSplit::ColorAndKey ShmSplit::color_and_key_of(int peer) const {
  ColorAndKey theirs{};
  std::memcpy(&theirs, engine_.ring_entry(peer, call.sequence).payload, sizeof theirs);
  return theirs;
}

// Group ranks of the parent, in the child's order.
std::vector<int> ShmSplit::members_of(int64_t color) const {
  std::vector<int> peers;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (color_and_key_of(peer).color == color) peers.push_back(peer);
  }
  std::stable_sort(peers.begin(), peers.end(), [this](int a, int b) {
    return color_and_key_of(a).key < color_and_key_of(b).key;
  });
  return peers;
}

// The child's control block first; then its leader's connections to the members, by their rank, or
// a member's to the leader.
std::vector<std::vector<OwnedDescriptor>> ShmSplit::make() {
  std::vector<std::vector<OwnedDescriptor>> messages(static_cast<size_t>(engine_.size()));
  for (int first = 0; first < engine_.size(); ++first) {
    if (!messages[static_cast<size_t>(first)].empty()) continue;  // of a color already seen
    const std::vector<int> peers = members_of(color_and_key_of(first).color);
    const OwnedDescriptor control = ShmControl::make(static_cast<int>(peers.size()));
    for (const int peer : peers) {
      messages[static_cast<size_t>(peer)].push_back(
          std::make_unique<Descriptor>(::fcntl(control->get(), F_DUPFD_CLOEXEC, 0)));
    }
    for (size_t member = 1; member < peers.size(); ++member) {
      auto [leader_end, member_end] = make_socket_pair();
      messages[static_cast<size_t>(peers[0])].push_back(std::move(leader_end));
      messages[static_cast<size_t>(peers[member])].push_back(std::move(member_end));
    }
  }
  return messages;
}

void ShmSplit::receive(std::vector<OwnedDescriptor> descriptors) {
  ShmMembership& parent = engine_.membership();
  ShmMembership child;
  child.group.name = group_name_;
  for (const int peer : members_of(color_and_key_.color)) {
    if (peer == engine_.rank()) child.group.rank = child.group.size();
    child.group.world_ranks.push_back(parent.group.world_ranks[static_cast<size_t>(peer)]);
    child.processes.push_back(parent.processes[static_cast<size_t>(peer)]);
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
