#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/self_messages.hpp"
#include "comm/shm/shm_collectives.hpp"
#include "comm/shm/shm_engine.hpp"
#include "comm/shm/shm_sharing.hpp"

namespace lockstep {

namespace {

// A message between two ranks streams through the ring of bytes that their ordered pair has: first
// its fingerprint, then its data.

// Bytes written or read before the other side is told: it can work on them meanwhile.
constexpr int64_t kStride = 64 << 10;
constexpr auto kHeadBytes = static_cast<int64_t>(sizeof(Fingerprint));

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

class Send final : public ShmMessage {
 public:
  Send(ShmEngine& engine, const Fingerprint& what, const CallContext& context, const void* data,
       int to)
      : ShmMessage(engine, what, context, to),
        pipe_(engine.control(), engine.rank(), to),
        data_(static_cast<const std::byte*>(data)),
        bytes_(what.count * dtype_bytes(what.dtype)) {}

  bool step() override {
    if (sent_ == 0 && call.sequence == 1) engine_.control().reserve_pipe(engine_.rank(), peer_);
    while (sent_ < kHeadBytes + bytes_) {
      const bool head = sent_ < kHeadBytes;
      const std::byte* from =
          head ? reinterpret_cast<const std::byte*>(&call) + sent_ : data_ + (sent_ - kHeadBytes);
      const int64_t moved =
          pipe_.write(from, head ? kHeadBytes - sent_ : kHeadBytes + bytes_ - sent_);
      if (moved == 0) return false;
      sent_ += moved;
    }
    return true;
  }

 private:
  PipeEnd pipe_;
  const std::byte* data_;
  int64_t bytes_;
  int64_t sent_ = 0;
};

class Recv final : public ShmMessage {
 public:
  Recv(ShmEngine& engine, const Fingerprint& what, const CallContext& context, void* data, int from)
      : ShmMessage(engine, what, context, from),
        pipe_(engine.control(), from, engine.rank()),
        data_(static_cast<std::byte*>(data)),
        bytes_(what.count * dtype_bytes(what.dtype)) {}

  bool step() override {
    while (received_ < kHeadBytes) {
      const int64_t moved =
          pipe_.read(reinterpret_cast<std::byte*>(&theirs_) + received_, kHeadBytes - received_);
      if (moved == 0) return false;
      received_ += moved;
      if (received_ == kHeadBytes) compare();
    }
    while (received_ < kHeadBytes + bytes_) {
      const int64_t done = received_ - kHeadBytes;
      const int64_t moved = pipe_.read(data_ + done, bytes_ - done);
      if (moved == 0) return false;
      received_ += moved;
    }
    return true;
  }

 private:
  // Before any data is taken. The error is recorded, so that the sender learns of it.
  void compare() const {
    require_same_message(engine_.group(), peer_, theirs_, engine_.rank(), call);
  }

  PipeEnd pipe_;
  std::byte* data_;
  int64_t bytes_;
  Fingerprint theirs_;
  int64_t received_ = 0;
};

class ShmBackend final : public Backend {
 public:
  explicit ShmBackend(ShmMembership membership)
      : engine_(std::make_shared<ShmEngine>(std::move(membership))), own_messages_(group()) {}
  ~ShmBackend() override { engine_->leave(); }
  ShmBackend(const ShmBackend&) = delete;
  ShmBackend& operator=(const ShmBackend&) = delete;

  std::string_view name() const override { return "shm"; }
  const Group& group() const override { return engine_->group(); }

  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override {
    check_reduce(buffer, op, weight);
    return begin<ShmAllReduce>(buffer, op, weight, context);
  }

  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    return begin<ShmBroadcast>(buffer, root, context);
  }

  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    return begin<ShmReduceScatter>(input, output, op, weight, context);
  }

  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override {
    check_all_gather(group(), input, output);
    return begin<ShmAllGather>(input, output, context);
  }

  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override {
    check_rooted_reduce(group(), buffer, root, op, weight);
    return begin<ShmReduce>(buffer, root, op, weight, context);
  }

  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override {
    check_exchange(group(), input, output, blocks);
    return begin<ShmExchange>(input, output, blocks, context);
  }

  void while_waiting(std::function<bool()> progress) override {
    engine_->while_waiting(std::move(progress));
  }

  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, to);
    if (to == rank()) {
      engine_->guarded([&] { own_messages_.send(buffer, tag, context); });
      return make_done_work();
    }
    engine_->session().throw_if_broken();
    const Fingerprint call = make_message_fingerprint(
        Operation::kSend, engine_->session().next_sent(to), buffer, tag, context.label);
    return begin<Send>(call, context, buffer.data, to);
  }

  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, from);
    if (from == rank()) {
      engine_->guarded([&] { own_messages_.recv(buffer, tag, context); });
      return make_done_work();
    }
    engine_->session().throw_if_broken();
    const Fingerprint call =
        make_message_fingerprint(Operation::kRecv, engine_->session().next_received(from),
                                 {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
    return begin<Recv>(call, context, buffer.data, from);
  }

  void barrier(const CallContext& context) override {
    ShmCollective task(*engine_, Fingerprint{}, context);
    engine_->run(task);
  }

  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override {
    ShmSplit task(*engine_, color, key, group_name, context);
    engine_->run(task);
    return std::make_unique<ShmBackend>(task.take_membership());
  }

  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override {
    return allocate(bytes, ShmAllocate::Kind::kOnePerRank, context);
  }

  bool can_share() const override { return true; }

  std::shared_ptr<RegisteredMemory> allocate_shared(int64_t bytes,
                                                    const CallContext& context) override {
    return allocate(bytes, ShmAllocate::Kind::kOneForAll, context);
  }

  void abort(const AbortRecord& record) noexcept override { engine_->abort(record); }

 private:
  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, ShmAllocate::Kind kind,
                                             const CallContext& context) {
    check_allocate(bytes);
    ShmAllocate task(*engine_, bytes, kind, context);
    engine_->run(task);
    return task.memory();
  }

  template <class Task, class... Arguments>
  std::unique_ptr<Work> begin(const Arguments&... arguments) {
    auto work = std::make_unique<Task>(*engine_, arguments...);
    ShmEngine::begin(engine_, *work);
    return work;
  }

  std::shared_ptr<ShmEngine> engine_;
  SelfMessages own_messages_;
};

}  // namespace

std::unique_ptr<Backend> make_shm_backend(const ShmOptions& options) {
  ShmMembership membership = rendezvous_of_processes(options);
  if (options.group) membership.group = *options.group;
  return std::make_unique<ShmBackend>(std::move(membership));
}

std::vector<std::unique_ptr<Backend>> make_shm_thread_backends(int size) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (ShmMembership& membership : rendezvous_of_threads(size)) {
    backends.push_back(std::make_unique<ShmBackend>(std::move(membership)));
  }
  return backends;
}

}  // namespace lockstep
