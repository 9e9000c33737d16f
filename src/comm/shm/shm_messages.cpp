#include "comm/shm/shm_messages.hpp"

#include <algorithm>
#include <cstring>

#include "comm/make_call.hpp"

namespace lockstep {
namespace {

// Bytes written or read before the other side is told: it can work on them meanwhile.
constexpr int64_t kStride = 64 << 10;
constexpr auto kCallBytes = static_cast<int64_t>(sizeof(Call));

// One end of a pipe's ring of bytes.
class PipeEnd {
 public:
  PipeEnd(const ShmControl& control, int from, int to)
      : control_(control),
        pipe_(control.pipe(from, to)),
        data_(control.pipe_data(from, to)),
        capacity_(control.pipe_bytes()) {}

  // Moves as much as there is room for; returns how much.
  int64_t write(const std::byte* from, int64_t bytes) {
    const int64_t written = pipe_.written.value.load(std::memory_order_relaxed);
    const int64_t read = pipe_.read.value.load(std::memory_order_seq_cst);
    const int64_t count = std::min({bytes, capacity_ - (written - read), kStride});
    if (count == 0) return 0;
    const int64_t first = std::min(count, capacity_ - written % capacity_);
    std::memcpy(data_ + written % capacity_, from, static_cast<size_t>(first));
    std::memcpy(data_, from + first, static_cast<size_t>(count - first));
    control_.announce(pipe_.written, written + count);
    return count;
  }

  int64_t read(std::byte* to, int64_t bytes) {
    const int64_t read = pipe_.read.value.load(std::memory_order_relaxed);
    const int64_t written = pipe_.written.value.load(std::memory_order_seq_cst);
    const int64_t count = std::min({bytes, written - read, kStride});
    if (count == 0) return 0;
    const int64_t first = std::min(count, capacity_ - read % capacity_);
    std::memcpy(to, data_ + read % capacity_, static_cast<size_t>(first));
    std::memcpy(to + first, data_, static_cast<size_t>(count - first));
    control_.announce(pipe_.read, read + count);
    return count;
  }

 private:
  const ShmControl& control_;
  PipeControl& pipe_;
  std::byte* data_;
  int64_t capacity_;
};

class Send final : public ShmTask {
 public:
  Send(const ShmEngine& engine, const Call& what, const CallContext& context, const void* data,
       int to)
      : ShmTask(what, context),
        engine_(engine),
        pipe_(engine.control(), engine.rank(), to),
        data_(static_cast<const std::byte*>(data)),
        bytes_(what.count * dtype_bytes(what.dtype)),
        to_(to) {}

  bool step() override {
    if (sent_ == 0 && call.sequence == 1) engine_.control().reserve_pipe(engine_.rank(), to_);
    while (sent_ < kCallBytes + bytes_) {
      const bool head = sent_ < kCallBytes;
      const std::byte* from =
          head ? reinterpret_cast<const std::byte*>(&call) + sent_ : data_ + (sent_ - kCallBytes);
      const int64_t moved =
          pipe_.write(from, head ? kCallBytes - sent_ : kCallBytes + bytes_ - sent_);
      if (moved == 0) return false;
      sent_ += moved;
    }
    return true;
  }
  std::vector<int> awaited() const override { return {to_}; }
  int peer() const override { return to_; }

 private:
  const ShmEngine& engine_;
  PipeEnd pipe_;
  const std::byte* data_;
  int64_t bytes_;
  int to_;
  int64_t sent_ = 0;
};

class Recv final : public ShmTask {
 public:
  Recv(const ShmEngine& engine, const Call& what, const CallContext& context, void* data, int from)
      : ShmTask(what, context),
        engine_(engine),
        pipe_(engine.control(), from, engine.rank()),
        data_(static_cast<std::byte*>(data)),
        bytes_(what.count * dtype_bytes(what.dtype)),
        from_(from) {}

  bool step() override {
    while (received_ < kCallBytes) {
      const int64_t moved =
          pipe_.read(reinterpret_cast<std::byte*>(&theirs_) + received_, kCallBytes - received_);
      if (moved == 0) return false;
      received_ += moved;
      if (received_ == kCallBytes) compare();
    }
    while (received_ < kCallBytes + bytes_) {
      const int64_t done = received_ - kCallBytes;
      const int64_t moved = pipe_.read(data_ + done, bytes_ - done);
      if (moved == 0) return false;
      received_ += moved;
    }
    return true;
  }
  std::vector<int> awaited() const override { return {from_}; }
  int peer() const override { return from_; }

 private:
  // Before any data is taken. The error is recorded, so that the sender learns of it.
  void compare() const {
    require_same_message(engine_.group(), from_, theirs_, engine_.rank(), call);
  }

  const ShmEngine& engine_;
  PipeEnd pipe_;
  std::byte* data_;
  int64_t bytes_;
  int from_;
  Call theirs_;
  int64_t received_ = 0;
};

}  // namespace

ShmMessages::ShmMessages(ShmEngine& engine)
    : engine_(engine),
      own_(engine.group()),
      sent_(static_cast<size_t>(engine.size())),
      received_(static_cast<size_t>(engine.size())) {}

void ShmMessages::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  if (to == engine_.rank()) {
    return engine_.guarded([&] { own_.send(buffer, tag, context); });
  }
  int64_t& sent = sent_[static_cast<size_t>(to)];
  const Call call = make_message_call(Operation::kSend, ++sent, buffer, tag, context.label);
  Send task(engine_, call, context, buffer.data, to);
  engine_.run_message(task);
}

void ShmMessages::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  if (from == engine_.rank()) {
    return engine_.guarded([&] { own_.recv(buffer, tag, context); });
  }
  int64_t& received = received_[static_cast<size_t>(from)];
  const Call call = make_message_call(
      Operation::kRecv, ++received, {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
  Recv task(engine_, call, context, buffer.data, from);
  engine_.run_message(task);
}

}  // namespace lockstep
