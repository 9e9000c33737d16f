// How a collective goes on, and those that move no elements.

#include <algorithm>

#include "comm/gpu/ipc_collectives.hpp"
#include "comm/make_call.hpp"

namespace lockstep {
namespace {

class IpcMemory final : public ReachableMemory {
 public:
  IpcMemory(std::shared_ptr<IpcShare> share, std::shared_ptr<std::atomic<bool>> dropped)
      : share_(std::move(share)), dropped_(std::move(dropped)) {}
  ~IpcMemory() override { dropped_->store(true); }
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  void* data() const override { return share_->memory(); }
  int64_t bytes() const override { return share_->bytes(); }

 private:
  std::shared_ptr<IpcShare> share_;
  std::shared_ptr<std::atomic<bool>> dropped_;
};

}  // namespace

void IpcCollective::begin() {
  call_ = core_.control().number(call_, context_);
  context_.label = {};
  if (is_awaited()) core_.record_ready(call_.sequence, context_.stream);
  const IpcPlace own = place();
  agreement_ = core_.control().agree(call_, context_, std::as_bytes(std::span(&own, 1)));
}

bool IpcCollective::go_on(Patience patience) {
  const auto over = [&](auto& awaited) {
    if (patience == Patience::kLookOnce) return awaited.advance();
    awaited.wait();
    return true;
  };
  if (done_) return true;
  if (!agreed_) {
    if (!over(*agreement_)) return false;
    agreed_ = true;
  }
  for (;;) {
    if (before_next_ && !over(*before_next_)) return false;
    before_next_ = next();
    if (before_next_) continue;
    done_ = true;
    return true;
  }
}

void IpcCollective::mark_result() {
  result_.emplace();
  result_->record(core_.stream());
}

void IpcCollective::hold_caller() {
  if (!result_) return;
  result_->hold(context_.stream);
  result_.reset();
}

std::unique_ptr<Awaited> IpcBarrier::next() {
  if (held_ || core_.size() == 1) return nullptr;
  core_.hold_all_ready(call_.sequence);
  mark_result();
  held_ = true;
  return handshake();  // all wait for the events of this barrier, not for later ones
}

IpcAllocate::IpcAllocate(IpcCore& core, int64_t bytes, const CallContext& context)
    : IpcCollective(core, make_call(Operation::kAllocate, Dtype::kU8, bytes), context) {}

std::unique_ptr<Awaited> IpcAllocate::next() {
  free_dropped();
  const auto own = IpcShare::make(call_.count, 0);
  auto dropped = std::make_shared<std::atomic<bool>>(false);
  memory_ = std::make_shared<IpcMemory>(own, dropped);
  if (call_.count == 0) return nullptr;
  const auto cards = core_.exchange(call_, context_.deadline_ns, own->card());
  cards->wait();
  core_.segments().push_back(
      {core_.next_segment(), call_.count, core_.open(*cards, own, 0), std::move(dropped)});
  handshake()->wait();  // all have opened what may otherwise end with its owner
  return nullptr;
}

// Frees what all ranks have dropped: first nobody uses a peer's memory any more, then each frees
// its own.
void IpcAllocate::free_dropped() {
  auto& segments = core_.segments();
  std::vector<std::byte> own;
  for (const IpcSegment& segment : segments) own.push_back(std::byte{segment.dropped->load()});
  if (own.empty()) return;
  const auto all = core_.exchange(call_, context_.deadline_ns, own);
  all->wait();
  std::vector<IpcSegment> kept;
  std::vector<IpcSegment> freed;
  for (size_t i = 0; i < segments.size(); ++i) {
    bool dropped = true;
    for (int place = 0; place < core_.size(); ++place) {
      dropped = dropped && all->block(place)[i] != std::byte{0};
    }
    (dropped ? freed : kept).push_back(std::move(segments[i]));
  }
  segments = std::move(kept);
  if (freed.empty()) return;
  core_.wait_until_idle(call_, context_.deadline_ns);
  for (IpcSegment& segment : freed) {
    for (int place = 0; place < core_.size(); ++place) {
      if (place != core_.rank()) segment.shares[static_cast<size_t>(place)].reset();
    }
  }
  handshake()->wait();
}

IpcSplit::IpcSplit(IpcCore& core, int colour, int key, std::string_view group_name,
                   const CallContext& context)
    : IpcCollective(core, make_call(Operation::kSplit, Dtype::kU8, 0), context),
      colour_(colour),
      key_(key),
      group_name_(group_name) {}

std::unique_ptr<Awaited> IpcSplit::next() {
  part_ = core_.control().split(colour_, key_, group_name_, call_, context_);
  return nullptr;
}

}  // namespace lockstep
