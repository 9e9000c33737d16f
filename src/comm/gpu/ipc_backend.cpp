#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/arguments.hpp"
#include "comm/backend.hpp"
#include "comm/gpu/gpu_control.hpp"
#include "comm/gpu/gpu_reduce.hpp"
#include "comm/gpu/ipc_collectives.hpp"
#include "comm/gpu/ipc_core.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// Messages between two ranks. The sender copies chunks into two slots of its own, in turn; the
/// receiver copies them out and acknowledges them. Acknowledgements travel through the host in
/// frames; each side works in the order of its call's stream. The data of a small message travels
/// there too, where processes share a GPU: see IpcHostStaged for why.
class IpcMessages {
 public:
  explicit IpcMessages(IpcCore& core);
  ~IpcMessages();
  IpcMessages(const IpcMessages&) = delete;
  IpcMessages& operator=(const IpcMessages&) = delete;

  void send(const ConstBuffer& buffer, int to, int tag, const CallContext& context);
  void recv(const Buffer& buffer, int from, int tag, const CallContext& context);

  /// Memory is about to go: waits until all that was sent is taken, at most until the deadline of
  /// its send. The core's stream then waits for what messages have queued elsewhere.
  void drain() noexcept;

 private:
  struct Frame;
  struct Heard;

  // What this rank sends to one peer.
  struct Outgoing {
    int64_t messages = 0;
    int64_t sent = 0;   // chunks
    int64_t taken = 0;  // of them
    Fingerprint last;
    int64_t deadline_ns = 0;          // of the last message
    std::shared_ptr<IpcShare> slots;  // null until there is data to send
  };
  // What one peer sends to this rank.
  struct Incoming {
    int64_t messages = 0;
    std::shared_ptr<IpcShare> slots;  // the sender's; null until there was data
  };

  void send_chunk(Outgoing& out, int to, const Fingerprint& call, const std::byte* data,
                  int64_t bytes, const CallContext& context);
  void send_host_staged(int to, const Fingerprint& call, const std::byte* data, int64_t bytes,
                        const CallContext& context);
  void take_chunk(Incoming& in, int from, const Fingerprint& call, const Frame& frame,
                  std::byte* data, const CallContext& context);
  void await_taken(Outgoing& out, int to, const Fingerprint& why, int64_t deadline_ns);
  void say(int to, const Frame& frame, const Fingerprint& why, int64_t deadline_ns);
  void say_bytes(int to, std::span<const std::byte> bytes, const Fingerprint& why,
                 int64_t deadline_ns);
  Heard hear(int from, int kind, const Fingerprint& why, int64_t deadline_ns);
  void hear_bytes(int from, std::span<std::byte> bytes, const Fingerprint& why,
                  int64_t deadline_ns);

  IpcCore& core_;
  GpuSelfMessages own_;
  std::vector<Outgoing> outgoing_;        // [rank]
  std::vector<Incoming> incoming_;        // [rank]
  std::vector<std::deque<Heard>> heard_;  // [rank]: came while another kind was awaited
  std::unique_ptr<PinnedMemory> down_;    // what is staged, on the host; null until it is needed
};

namespace {

constexpr int64_t kChunkBytes = 8 << 20;
constexpr int kSlots = IpcCore::kMessageSlots;  // each with an event that it was filled
constexpr int kData = 0;
constexpr int kTaken = 1;

int slot_of(int64_t chunk) {
  return static_cast<int>(chunk % kSlots);
}

}  // namespace

// What travels over the host. The handle is that of the slots.
struct IpcMessages::Frame {
  int64_t kind = kData;
  int64_t chunk = 0;   // of this pair, counted from 0
  int64_t bytes = 0;   // in a slot; 0: a message without data
  int64_t staged = 0;  // bytes that follow the frame
  Fingerprint call;
  std::array<std::byte, 512> handle = {};

  void put(const IpcShare& share) {
    const auto bytes_of_handle = share.handle();
    std::memcpy(handle.data(), bytes_of_handle.data(), bytes_of_handle.size());
  }
  std::shared_ptr<IpcShare> open() const {
    return IpcShare::open(std::span(handle).first(IpcShare::handle_bytes(kSlots)), kSlots);
  }
};

struct IpcMessages::Heard {
  Frame frame;
  std::vector<std::byte> staged;
};

IpcMessages::IpcMessages(IpcCore& core)
    : core_(core),
      own_(core.group()),
      outgoing_(static_cast<size_t>(core.size())),
      incoming_(static_cast<size_t>(core.size())),
      heard_(static_cast<size_t>(core.size())) {
  if (IpcShare::handle_bytes(kSlots) > sizeof(Frame::handle)) {
    throw Error(Code::kInternal, "a handle is larger than its frame");
  }
}

IpcMessages::~IpcMessages() = default;

void IpcMessages::send(const ConstBuffer& buffer, int to, int tag, const CallContext& context) {
  core_.control().guarded([&] {
    if (to == core_.rank()) return own_.send(buffer, tag, context);
    Outgoing& out = outgoing_[static_cast<size_t>(to)];
    const Fingerprint call =
        make_message_fingerprint(Operation::kSend, ++out.messages, buffer, tag, context.label);
    out.last = call;
    out.deadline_ns = context.deadline_ns;
    const auto* data = static_cast<const std::byte*>(buffer.data);
    const int64_t total = buffer.bytes();
    if (total > 0 && core_.stages_on_host(total))
      return send_host_staged(to, call, data, total, context);
    int64_t done = 0;
    do {
      const int64_t bytes = std::min(kChunkBytes, total - done);
      send_chunk(out, to, call, data + done, bytes, context);
      done += bytes;
    } while (done < total);
  });
}

void IpcMessages::send_chunk(Outgoing& out, int to, const Fingerprint& call, const std::byte* data,
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

void IpcMessages::send_host_staged(int to, const Fingerprint& call, const std::byte* data,
                                   int64_t bytes, const CallContext& context) {
  if (!down_) down_ = std::make_unique<PinnedMemory>(IpcCore::kHostStagedBytes);
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
  frame.staged = bytes;
  say(to, frame, call, context.deadline_ns);
  say_bytes(to, {down_->data(), static_cast<size_t>(bytes)}, call, context.deadline_ns);
}

// The peer tells it after it has recorded its event.
void IpcMessages::await_taken(Outgoing& out, int to, const Fingerprint& why, int64_t deadline_ns) {
  out.taken = hear(to, kTaken, why, deadline_ns).frame.chunk + 1;
}

void IpcMessages::recv(const Buffer& buffer, int from, int tag, const CallContext& context) {
  core_.control().guarded([&] {
    if (from == core_.rank()) return own_.recv(buffer, tag, context);
    Incoming& in = incoming_[static_cast<size_t>(from)];
    const Fingerprint call =
        make_message_fingerprint(Operation::kRecv, ++in.messages,
                                 {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
    auto* data = static_cast<std::byte*>(buffer.data);
    const int64_t total = buffer.bytes();
    int64_t done = 0;
    do {
      const auto [frame, staged] = hear(from, kData, call, context.deadline_ns);
      require_same_message(core_.group(), from, frame.call, core_.rank(), call);
      if (frame.bytes > 0) take_chunk(in, from, call, frame, data + done, context);
      // Memory that is not pinned: CUDA has read it when this returns.
      gpu_copy(data + done, staged.data(), frame.staged, context.stream);
      done += frame.bytes + frame.staged;
    } while (done < total);
  });
}

void IpcMessages::take_chunk(Incoming& in, int from, const Fingerprint& call, const Frame& frame,
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

void IpcMessages::say(int to, const Frame& frame, const Fingerprint& why, int64_t deadline_ns) {
  say_bytes(to, std::as_bytes(std::span(&frame, 1)), why, deadline_ns);
}

void IpcMessages::say_bytes(int to, std::span<const std::byte> bytes, const Fingerprint& why,
                            int64_t deadline_ns) {
  core_.block([&] {
    core_.control()
        .channel(IpcCore::kMessages)
        .send({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8}, to, 0,
              {.deadline_ns = deadline_ns, .part_of = &why})
        ->wait();
  });
}

IpcMessages::Heard IpcMessages::hear(int from, int kind, const Fingerprint& why,
                                     int64_t deadline_ns) {
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
    next.staged.resize(static_cast<size_t>(next.frame.staged));
    if (!next.staged.empty()) hear_bytes(from, next.staged, why, deadline_ns);
    if (next.frame.kind == kind) return next;
    heard.push_back(std::move(next));
  }
}

void IpcMessages::hear_bytes(int from, std::span<std::byte> bytes, const Fingerprint& why,
                             int64_t deadline_ns) {
  core_.block([&] {
    core_.control()
        .channel(IpcCore::kMessages)
        .recv({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8}, from, 0,
              {.deadline_ns = deadline_ns, .part_of = &why})
        ->wait();
  });
}

namespace {

class IpcWork final : public Backend::Work {
 public:
  IpcWork(std::shared_ptr<IpcCore> core, std::shared_ptr<IpcCollective> task)
      : core_(std::move(core)), task_(std::move(task)) {}
  ~IpcWork() override {
    if (task_->done()) {
      hold_caller();
    } else {
      core_->session().abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                                            : "dropped a call before it was done");
    }
  }
  IpcWork(const IpcWork&) = delete;
  IpcWork& operator=(const IpcWork&) = delete;

  bool advance() override {
    const GpuGuard guard(core_->gpu());
    if (!core_->advance(*task_)) return false;
    task_->hold_caller();
    return true;
  }

  void wait() override {
    const GpuGuard guard(core_->gpu());
    core_->wait(*task_);
    task_->hold_caller();
  }

 private:
  // Done by another call's progress and dropped: its buffer is freed in the order of its stream.
  void hold_caller() noexcept {
    try {
      const GpuGuard guard(core_->gpu());
      task_->hold_caller();
    } catch (const std::exception&) {
      // The GPU itself has failed: nothing runs there any more.
    }
  }

  std::shared_ptr<IpcCore> core_;
  std::shared_ptr<IpcCollective> task_;
};

// A recv that was begun. It happens when it is first asked for, after those that were begun before.
class IpcRecv final : public Backend::Work {
 public:
  using Queue = std::deque<IpcRecv*>;  // of one peer

  IpcRecv(std::shared_ptr<IpcCore> core, Queue& queue, std::function<void()> receive)
      : core_(std::move(core)), queue_(queue), receive_(std::move(receive)) {
    queue_.push_back(this);
  }
  ~IpcRecv() override {
    if (!receive_) return;
    std::erase(queue_, this);
    core_->session().abort("dropped a message before it was done");
  }
  IpcRecv(const IpcRecv&) = delete;
  IpcRecv& operator=(const IpcRecv&) = delete;

  bool advance() override {
    wait();
    return true;
  }
  void wait() override {
    while (receive_) {
      IpcRecv& next = *queue_.front();
      queue_.pop_front();
      std::exchange(next.receive_, nullptr)();
    }
  }

 private:
  std::shared_ptr<IpcCore> core_;
  Queue& queue_;
  std::function<void()> receive_;  // null once done
};

class IpcBackend final : public Backend {
 public:
  IpcBackend(std::unique_ptr<GpuControl> control, int gpu, int64_t deadline_ns)
      : core_(std::make_shared<IpcCore>(std::move(control), gpu, deadline_ns)), messages_(*core_) {}
  ~IpcBackend() override {
    if (std::uncaught_exceptions() > 0) core_->session().abort("failed with an exception");
    messages_.drain();
    core_->leave();
  }
  IpcBackend(const IpcBackend&) = delete;
  IpcBackend& operator=(const IpcBackend&) = delete;

  std::string_view name() const override { return "ipc"; }
  bool on_gpu() const override { return true; }
  const Group& group() const override { return core_->group(); }

  std::unique_ptr<Work> all_reduce(const Buffer& buffer, ReduceOp op, double weight,
                                   const CallContext& context) override {
    check_reduce(buffer, op, weight);
    return begin<IpcAllReduce>("all_reduce of ipc", context, buffer, op, weight);
  }

  std::unique_ptr<Work> broadcast(const Buffer& buffer, int root,
                                  const CallContext& context) override {
    check_broadcast(group(), buffer, root);
    return begin<IpcBroadcast>("broadcast of ipc", context, buffer, root);
  }

  std::unique_ptr<Work> reduce_scatter(const ConstBuffer& input, const Buffer& output, ReduceOp op,
                                       double weight, const CallContext& context) override {
    check_reduce_scatter(group(), input, output, op, weight);
    return begin<IpcReduceScatter>("reduce_scatter of ipc", context, input, output, op, weight);
  }

  std::unique_ptr<Work> all_gather(const ConstBuffer& input, const Buffer& output,
                                   const CallContext& context) override {
    check_all_gather(group(), input, output);
    return begin<IpcAllGather>("all_gather of ipc", context, input, output);
  }

  std::unique_ptr<Work> reduce(const Buffer& buffer, int root, ReduceOp op, double weight,
                               const CallContext& context) override {
    check_rooted_reduce(group(), buffer, root, op, weight);
    return begin<IpcReduce>("reduce of ipc", context, buffer, root, op, weight);
  }

  std::unique_ptr<Work> exchange(const ConstBuffer& input, const Buffer& output,
                                 const BlockExchange& blocks, const CallContext& context) override {
    check_exchange(group(), input, output, blocks);
    return begin<IpcExchange>("exchange of ipc", context, input, output, blocks);
  }

  // Waits only where the receiver has taken none of the last two chunks.
  std::unique_ptr<Work> send(const ConstBuffer& buffer, int to, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, to);
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, "send of ipc");
    messages_.send(buffer, to, tag, context);
    return make_done_work();
  }

  std::unique_ptr<Work> recv(const Buffer& buffer, int from, int tag,
                             const CallContext& context) override {
    check_message(group(), buffer.count, from);
    const auto receive = [this, buffer, from, tag, context, label = std::string(context.label)] {
      const GpuGuard guard(core_->gpu());
      check_not_captured(context.stream, "recv of ipc");
      CallContext labelled = context;
      labelled.label = label;
      messages_.recv(buffer, from, tag, labelled);
    };
    return std::make_unique<IpcRecv>(core_, receives_[from], receive);
  }

  void barrier(const CallContext& context) override { run<IpcBarrier>("barrier of ipc", context); }

  std::unique_ptr<Backend> split(int color, int key, std::string_view group_name,
                                 const CallContext& context) override {
    auto task = run<IpcSplit>("split of ipc", context, color, key, group_name);
    return std::make_unique<IpcBackend>(task->take_control(), core_->gpu(), context.deadline_ns);
  }

  std::shared_ptr<RegisteredMemory> allocate(int64_t bytes, const CallContext& context) override {
    check_allocate(bytes);
    return run<IpcAllocate>("allocate of ipc", context, bytes)->memory();
  }

  void abort(const AbortRecord& record) noexcept override { core_->session().abort(record); }

 private:
  template <class Collective, class... Arguments>
  std::unique_ptr<Work> begin(std::string_view what, const CallContext& context,
                              const Arguments&... arguments) {
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, what);
    auto task = std::make_shared<Collective>(*core_, arguments..., context);
    core_->begin(task);
    return std::make_unique<IpcWork>(core_, std::move(task));
  }

  template <class Collective, class... Arguments>
  std::shared_ptr<Collective> run(std::string_view what, const CallContext& context,
                                  const Arguments&... arguments) {
    const GpuGuard guard(core_->gpu());
    check_not_captured(context.stream, what);
    auto task = std::make_shared<Collective>(*core_, arguments..., context);
    core_->run(task);
    return task;
  }

  std::shared_ptr<IpcCore> core_;
  IpcMessages messages_;
  std::map<int, IpcRecv::Queue> receives_;  // [peer], begun and not done
};

}  // namespace

std::unique_ptr<Backend> make_ipc_backend(const GpuBackendOptions& options) {
  if (options.host->size() > kMostGpuReduceRanks) {
    throw Error(Code::kBackend, fmt::format("ipc for {} ranks", options.host->size()),
                fmt::format("it serves up to {}: use --backend nccl with a GPU for each rank",
                            kMostGpuReduceRanks));
  }
  auto control =
      std::make_unique<GpuControl>(*options.host, IpcCore::kChannels, options.deadline_ns);
  return std::make_unique<IpcBackend>(std::move(control), options.gpu, options.deadline_ns);
}

}  // namespace lockstep
