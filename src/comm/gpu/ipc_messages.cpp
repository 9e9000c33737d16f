#include "comm/gpu/ipc_messages.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/make_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

constexpr int64_t kChunkBytes = 8 << 20;
constexpr int kSlots = IpcCore::kMessageSlots;  // each with an event that it was filled
constexpr int kData = 0;
constexpr int kTaken = 1;

int slot_of(int64_t chunk) {
  return static_cast<int>(chunk % kSlots);
}

}  // namespace

// What travels over the host. The card is that of the slots.
struct IpcMessages::Frame {
  int64_t kind = kData;
  int64_t chunk = 0;    // of this pair, counted from 0
  int64_t bytes = 0;    // in a slot; 0: a message without data
  int64_t carried = 0;  // bytes that follow the frame
  Call call;
  std::array<std::byte, 512> card = {};

  void put(const IpcShare& share) {
    const auto bytes_of_card = share.card();
    std::memcpy(card.data(), bytes_of_card.data(), bytes_of_card.size());
  }
  std::shared_ptr<IpcShare> open() const {
    return IpcShare::open(std::span(card).first(IpcShare::card_bytes(kSlots)), kSlots);
  }
};

struct IpcMessages::Heard {
  Frame frame;
  std::vector<std::byte> carried;
};

IpcMessages::IpcMessages(IpcCore& core)
    : core_(core),
      own_(core.group()),
      outgoing_(static_cast<size_t>(core.size())),
      incoming_(static_cast<size_t>(core.size())),
      heard_(static_cast<size_t>(core.size())) {
  if (IpcShare::card_bytes(kSlots) > sizeof(Frame::card)) {
    throw Error(Code::kInternal, "a card is larger than its frame");
  }
}

IpcMessages::~IpcMessages() = default;

void IpcMessages::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  core_.control().guarded([&] {
    if (to == core_.rank()) return own_.send(buffer, tag, context);
    Outgoing& out = outgoing_[static_cast<size_t>(to)];
    const Call call =
        make_message_call(Operation::kSend, ++out.messages, buffer, tag, context.label);
    out.last = call;
    out.deadline_ns = context.deadline_ns;
    const auto* data = static_cast<const std::byte*>(buffer.data);
    const int64_t total = buffer.bytes();
    if (total > 0 && core_.carries(total)) return send_carried(to, call, data, total, context);
    int64_t done = 0;
    do {
      const int64_t bytes = std::min(kChunkBytes, total - done);
      send_chunk(out, to, call, data + done, bytes, context);
      done += bytes;
    } while (done < total);
  });
}

void IpcMessages::send_chunk(Outgoing& out, int to, const Call& call, const std::byte* data,
                             int64_t bytes, const CallContext& context) {
  Frame frame;
  frame.call = call;
  frame.bytes = bytes;
  frame.chunk = out.sent;
  if (bytes > 0) {
    if (!out.slots) {
      out.slots = IpcShare::make(kSlots * kChunkBytes, kSlots);
      core_.keep_share(to, out.slots);
    }
    while (out.sent - out.taken >= kSlots) await_taken(out, to, call, context.deadline_ns);
    const int slot = slot_of(out.sent);
    if (out.sent >= kSlots) core_.message_taken(to, core_.rank(), slot).hold(context.stream);
    gpu_copy(out.slots->memory() + slot * kChunkBytes, data, bytes, context.stream);
    out.slots->event(slot).record(context.stream);
    ++out.sent;
    frame.put(*out.slots);
  }
  say(to, frame, call, context.deadline_ns);
}

void IpcMessages::send_carried(int to, const Call& call, const std::byte* data, int64_t bytes,
                               const CallContext& context) {
  if (!down_) down_ = std::make_unique<PinnedMemory>(IpcCore::kCarriedBytes);
  gpu_copy(down_->data(), data, bytes, context.stream);
  const GpuEvent is_down;
  is_down.record(context.stream);
  try {
    core_.block([&] { core_.await(is_down, call, context.deadline_ns); });
  } catch (...) {
    (void)down_.release();  // the GPU may still write there
    throw;
  }
  Frame frame;
  frame.call = call;
  frame.carried = bytes;
  say(to, frame, call, context.deadline_ns);
  say_bytes(to, {down_->data(), static_cast<size_t>(bytes)}, call, context.deadline_ns);
}

// The peer tells it after it has recorded its event.
void IpcMessages::await_taken(Outgoing& out, int to, const Call& why, int64_t deadline_ns) {
  out.taken = hear(to, kTaken, why, deadline_ns).frame.chunk + 1;
}

void IpcMessages::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  core_.control().guarded([&] {
    if (from == core_.rank()) return own_.recv(buffer, tag, context);
    Incoming& in = incoming_[static_cast<size_t>(from)];
    const Call call =
        make_message_call(Operation::kRecv, ++in.messages,
                          {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
    auto* data = static_cast<std::byte*>(buffer.data);
    const int64_t total = buffer.bytes();
    int64_t done = 0;
    do {
      const auto [frame, carried] = hear(from, kData, call, context.deadline_ns);
      require_same_message(core_.group(), from, frame.call, core_.rank(), call);
      if (frame.bytes > 0) take_chunk(in, from, call, frame, data + done, context);
      // Memory that is not pinned: CUDA has read it when this returns.
      gpu_copy(data + done, carried.data(), frame.carried, context.stream);
      done += frame.bytes + frame.carried;
    } while (done < total);
  });
}

void IpcMessages::take_chunk(Incoming& in, int from, const Call& call, const Frame& frame,
                             std::byte* data, const CallContext& context) {
  if (!in.slots) {
    in.slots = frame.open();
    core_.keep_share(from, in.slots);
  }
  const int slot = slot_of(frame.chunk);
  in.slots->event(slot).hold(context.stream);
  gpu_copy(data, in.slots->memory() + slot * kChunkBytes, frame.bytes, context.stream);
  core_.message_taken(core_.rank(), from, slot).record(context.stream);
  Frame taken;
  taken.kind = kTaken;
  taken.chunk = frame.chunk;
  taken.call = call;
  say(from, taken, call, context.deadline_ns);
}

void IpcMessages::drain() noexcept {
  try {
    const GpuGuard guard(core_.gpu());
    // The core's stream is waited for before memory goes: it stands for the callers' streams.
    for (int from = 0; from < core_.size(); ++from) {
      for (int slot = 0; slot < kSlots; ++slot) {
        core_.message_taken(core_.rank(), from, slot).hold(core_.stream());
      }
    }
    core_.control().guarded([&] {
      for (int to = 0; to < core_.size(); ++to) {
        Outgoing& out = outgoing_[static_cast<size_t>(to)];
        while (out.taken < out.sent) await_taken(out, to, out.last, out.deadline_ns);
        for (int slot = 0; out.sent > 0 && slot < kSlots; ++slot) {
          core_.message_taken(to, core_.rank(), slot).hold(core_.stream());
        }
      }
    });
  } catch (const std::exception&) {
    // The receiver is gone, or never wanted it.
  }
}

void IpcMessages::say(int to, const Frame& frame, const Call& why, int64_t deadline_ns) {
  say_bytes(to, std::as_bytes(std::span(&frame, 1)), why, deadline_ns);
}

void IpcMessages::say_bytes(int to, std::span<const std::byte> bytes, const Call& why,
                            int64_t deadline_ns) {
  core_.block([&] {
    try {
      core_.control()
          .channel(IpcCore::kMessages)
          .send({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8}, to, 0,
                {.deadline_ns = deadline_ns, .label = ""});
    } catch (const Error&) {
      rethrow_as_part_of(core_.group(), why);
    }
  });
}

IpcMessages::Heard IpcMessages::hear(int from, int kind, const Call& why, int64_t deadline_ns) {
  auto& heard = heard_[static_cast<size_t>(from)];
  const auto found = std::find_if(heard.begin(), heard.end(),
                                  [&](const Heard& earlier) { return earlier.frame.kind == kind; });
  if (found != heard.end()) {
    Heard result = std::move(*found);
    heard.erase(found);
    return result;
  }
  for (;;) {
    Heard next;
    hear_bytes(from, std::as_writable_bytes(std::span(&next.frame, 1)), why, deadline_ns);
    next.carried.resize(static_cast<size_t>(next.frame.carried));
    if (!next.carried.empty()) hear_bytes(from, next.carried, why, deadline_ns);
    if (next.frame.kind == kind) return next;
    heard.push_back(std::move(next));
  }
}

void IpcMessages::hear_bytes(int from, std::span<std::byte> bytes, const Call& why,
                             int64_t deadline_ns) {
  core_.block([&] {
    try {
      core_.control()
          .channel(IpcCore::kMessages)
          .recv({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8}, from, 0,
                {.deadline_ns = deadline_ns, .label = ""});
    } catch (const Error&) {
      rethrow_as_part_of(core_.group(), why);
    }
  });
}

}  // namespace lockstep
