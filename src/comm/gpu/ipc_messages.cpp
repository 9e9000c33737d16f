#include "comm/gpu/ipc_messages.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/running_clock.hpp"
#include "comm/arguments.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

namespace {

constexpr int64_t kChunkBytes = 8 << 20;
constexpr int kSlots = IpcCore::kMessageSlots;  // each with an event that it was filled

// The deadline of a part of a message that nobody waits for.
constexpr int64_t kNever = INT64_MAX;

int slot_of(int64_t chunk) {
  return static_cast<int>(chunk % kSlots);
}

}  // namespace

// What travels over the host with a chunk. The handle is that of the slots.
struct IpcMessages::Frame {
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

// One message that was begun. Those of one direction between two ranks happen in order.
class IpcMessages::Message : public Backend::Work {
 public:
  Message(std::shared_ptr<IpcMessages> messages, Queue& queue, int peer, const Fingerprint& call,
          const CallContext& context)
      : messages_(std::move(messages)),
        queue_(queue),
        peer_(peer),
        call_(call),
        stream_(context.stream),
        deadline_ns_(context.deadline_ns) {}

  bool advance() override {
    if (!done_) messages_->advance(*this);
    return done_;
  }
  void wait() override {
    if (!done_) messages_->wait(*this);
  }

  /// Does what can be done without waiting; true when the message is done.
  virtual bool step() = 0;
  /// The host's call that the next step needs; null where it needs something else.
  virtual Backend::Work* blocker() const = 0;

  /// The deadline of whoever waits for this message now, or for one behind it; kNever: nobody.
  void set_limit(int64_t limit_ns) {
    limit_ns_ = limit_ns;
    if (Backend::Work* work = blocker()) work->set_deadline(limit_ns);
  }

  Queue& queue() const { return queue_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  CudaStream stream() const { return stream_; }
  bool done() const { return done_; }
  void set_done() { done_ = true; }

 protected:
  /// For destructors, before the host's calls go.
  void drop_unless_done() noexcept {
    if (!std::exchange(done_, true)) messages_->drop(*this);
  }
  IpcCore& core() const { return *messages_->core_; }
  CallContext on_host() const { return {.deadline_ns = limit_ns_, .part_of = &call_}; }
  Backend& channel(IpcCore::Channel which) const { return core().control().channel(which); }

  std::shared_ptr<IpcMessages> messages_;
  Queue& queue_;
  int peer_;
  Fingerprint call_;
  CudaStream stream_;
  int64_t deadline_ns_;
  int64_t limit_ns_ = kNever;

 private:
  bool done_ = false;
};

class IpcMessages::Send final : public Message {
 public:
  Send(std::shared_ptr<IpcMessages> messages, int to, const Fingerprint& call,
       const ConstBuffer& buffer, const CallContext& context)
      : Message(messages, messages->outgoing_[static_cast<size_t>(to)].queue, to, call, context),
        out_(messages->outgoing_[static_cast<size_t>(to)]),
        data_(static_cast<const std::byte*>(buffer.data)),
        total_(buffer.bytes()),
        staged_(total_ > 0 && core().stages_on_host(total_)) {}
  ~Send() override {
    drop_unless_done();
    if (!handed_over_) (void)down_.release();  // the GPU may still write there
  }
  Send(const Send&) = delete;
  Send& operator=(const Send&) = delete;

  bool step() override {
    // The receiver answers to what has come to it.
    while (goes_on_host() && !handed_over_) {
      if (!(staged_ ? hand_over_staged() : hand_over_chunk())) return false;
    }
    if (!goes_on_host()) return false;
    if (down_) messages_->spare_.push_back(std::move(down_));
    return true;
  }

  Backend::Work* blocker() const override {
    return to_host_.empty() ? taken_work_.get() : to_host_.front().get();
  }

 private:
  // Whether the host has taken everything that it was given.
  bool goes_on_host() {
    while (!to_host_.empty() && to_host_.front()->advance()) to_host_.pop_front();
    return to_host_.empty();
  }

  bool hand_over_chunk() {
    const int64_t bytes = std::min(kChunkBytes, total_ - sent_);
    if (bytes > 0 && !slot_is_free()) return false;
    frame_ = {};
    frame_.call = call_;
    if (bytes > 0) fill_slot(bytes);
    say(std::as_bytes(std::span(&frame_, 1)));
    sent_ += bytes;
    handed_over_ = sent_ == total_;
    return true;
  }

  // The peer says so after it has recorded its event.
  bool slot_is_free() {
    while (out_.sent - out_.taken >= kSlots) {
      if (!taken_work_) {
        taken_work_ = channel(IpcCore::kTaken).recv({&taken_, 1, Dtype::kI64}, peer_, 0, on_host());
      }
      if (!taken_work_->advance()) return false;
      taken_work_.reset();
      out_.taken = taken_ + 1;
    }
    return true;
  }

  void fill_slot(int64_t bytes) {
    if (!out_.slots) {
      out_.slots = IpcShare::make(kSlots * kChunkBytes, kSlots);
      core().keep_share(peer_, out_.slots);
    }
    const int slot = slot_of(out_.sent);
    if (out_.sent >= kSlots) core().message_taken(peer_, core().rank(), slot).hold(stream_);
    gpu_copy(out_.slots->memory() + slot * kChunkBytes, data_ + sent_, bytes, stream_);
    out_.slots->event(slot).record(stream_);
    frame_.bytes = bytes;
    frame_.chunk = out_.sent++;
    frame_.put(*out_.slots);
  }

  bool hand_over_staged() {
    if (!down_) {
      auto& spare = messages_->spare_;
      if (spare.empty()) spare.push_back(std::make_unique<PinnedMemory>(IpcCore::kHostStagedBytes));
      is_down_.emplace();
      down_ = std::move(spare.back());
      spare.pop_back();
      gpu_copy(down_->data(), data_, total_, stream_);
      is_down_->record(stream_);
    }
    if (!IpcCore::reached(*is_down_, call_, limit_ns_)) return false;
    frame_.call = call_;
    frame_.staged = total_;
    say(std::as_bytes(std::span(&frame_, 1)));
    say({down_->data(), static_cast<size_t>(total_)});
    return handed_over_ = true;
  }

  void say(std::span<const std::byte> bytes) {
    to_host_.push_back(channel(IpcCore::kMessages)
                           .send({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8},
                                 peer_, 0, on_host()));
  }

  Outgoing& out_;
  const std::byte* data_;
  int64_t total_;
  bool staged_;
  int64_t sent_ = 0;
  bool handed_over_ = false;
  int64_t taken_ = 0;                   // the last chunk that the peer says it took
  std::unique_ptr<PinnedMemory> down_;  // null until it is needed
  std::optional<GpuEvent> is_down_;     // where there is down_
  Frame frame_;                         // on its way, where there is something in to_host_
  std::deque<std::unique_ptr<Backend::Work>> to_host_;
  std::unique_ptr<Backend::Work> taken_work_;
};

class IpcMessages::Recv final : public Message {
 public:
  Recv(std::shared_ptr<IpcMessages> messages, int from, const Fingerprint& call,
       const Buffer& buffer, const CallContext& context)
      : Message(messages, messages->incoming_[static_cast<size_t>(from)].queue, from, call,
                context),
        in_(messages->incoming_[static_cast<size_t>(from)]),
        data_(static_cast<std::byte*>(buffer.data)),
        total_(buffer.bytes()) {}
  ~Recv() override { drop_unless_done(); }
  Recv(const Recv&) = delete;
  Recv& operator=(const Recv&) = delete;

  bool step() override {
    for (;;) {
      if (!from_host_) from_host_ = hear(std::as_writable_bytes(std::span(&frame_, 1)));
      if (!from_host_->advance()) return false;
      if (!has_frame_) {
        has_frame_ = true;
        require_same_message(core().group(), peer_, frame_.call, core().rank(), call_);
        if (frame_.staged > 0) {
          staged_.resize(static_cast<size_t>(frame_.staged));
          from_host_ = hear(staged_);
          continue;
        }
      }
      if (frame_.bytes > 0) take_chunk();
      // Memory that is not pinned: CUDA has read it when this returns.
      if (frame_.staged > 0) gpu_copy(data_ + taken_, staged_.data(), frame_.staged, stream_);
      taken_ += frame_.bytes + frame_.staged;
      from_host_.reset();
      has_frame_ = false;
      if (taken_ >= total_) return true;
    }
  }

  Backend::Work* blocker() const override { return from_host_.get(); }

 private:
  std::unique_ptr<Backend::Work> hear(std::span<std::byte> bytes) const {
    return channel(IpcCore::kMessages)
        .recv({bytes.data(), static_cast<int64_t>(bytes.size()), Dtype::kU8}, peer_, 0, on_host());
  }

  void take_chunk() {
    if (!in_.slots) {
      in_.slots = frame_.open();
      core().keep_share(peer_, in_.slots);
    }
    const int slot = slot_of(frame_.chunk);
    in_.slots->event(slot).hold(stream_);
    gpu_copy(data_ + taken_, in_.slots->memory() + slot * kChunkBytes, frame_.bytes, stream_);
    core().message_taken(core().rank(), peer_, slot).record(stream_);
    // The host keeps as many of these as there are slots: this does not wait.
    channel(IpcCore::kTaken).send({&frame_.chunk, 1, Dtype::kI64}, peer_, 0, on_host())->wait();
  }

  Incoming& in_;
  std::byte* data_;
  int64_t total_;
  int64_t taken_ = 0;  // bytes
  Frame frame_;
  bool has_frame_ = false;
  std::vector<std::byte> staged_;
  std::unique_ptr<Backend::Work> from_host_;  // null before a frame
};

class IpcMessages::SelfRecv final : public Message {
 public:
  SelfRecv(std::shared_ptr<IpcMessages> messages, const Fingerprint& call, const Buffer& buffer,
           int tag, const CallContext& context)
      : Message(messages, messages->incoming_[static_cast<size_t>(messages->core_->rank())].queue,
                messages->core_->rank(), call, context),
        buffer_(buffer),
        tag_(tag),
        label_(context.label) {}
  ~SelfRecv() override { drop_unless_done(); }
  SelfRecv(const SelfRecv&) = delete;
  SelfRecv& operator=(const SelfRecv&) = delete;

  // Where there is no message and the caller waits for one, this is an error.
  bool step() override {
    if (messages_->own_.empty() && limit_ns_ == kNever) return false;
    messages_->own_.recv(buffer_, tag_,
                         {.deadline_ns = deadline_ns_, .label = label_, .stream = stream_});
    return true;
  }

  Backend::Work* blocker() const override { return nullptr; }

 private:
  Buffer buffer_;
  int tag_;
  std::string label_;
};

IpcMessages::IpcMessages(std::shared_ptr<IpcCore> core)
    : core_(std::move(core)),
      own_(core_->group()),
      outgoing_(static_cast<size_t>(core_->size())),
      incoming_(static_cast<size_t>(core_->size())) {
  if (IpcShare::handle_bytes(kSlots) > sizeof(Frame::handle)) {
    throw Error(Code::kInternal, "a handle is larger than its frame");
  }
  core_->serve(this);
}

IpcMessages::~IpcMessages() {
  core_->serve(nullptr);
}

std::unique_ptr<Backend::Work> IpcMessages::send(const ConstBuffer& buffer, int to, int tag,
                                                 const CallContext& context) {
  if (to == core_->rank()) {
    core_->control().guarded([&] { own_.send(buffer, tag, context); });
    return make_done_work();
  }
  core_->session().throw_if_broken();
  Outgoing& out = outgoing_[static_cast<size_t>(to)];
  out.last = make_message_fingerprint(Operation::kSend, core_->session().next_sent(to), buffer, tag,
                                      context.label);
  out.deadline_ns = context.deadline_ns;
  return begin(std::make_unique<Send>(shared_from_this(), to, out.last, buffer, context));
}

std::unique_ptr<Backend::Work> IpcMessages::recv(const Buffer& buffer, int from, int tag,
                                                 const CallContext& context) {
  core_->session().throw_if_broken();
  const Fingerprint call =
      make_message_fingerprint(Operation::kRecv, core_->session().next_received(from),
                               {buffer.data, buffer.count, buffer.dtype}, tag, context.label);
  if (from == core_->rank()) {
    return begin(std::make_unique<SelfRecv>(shared_from_this(), call, buffer, tag, context));
  }
  return begin(std::make_unique<Recv>(shared_from_this(), from, call, buffer, context));
}

std::unique_ptr<Backend::Work> IpcMessages::begin(std::unique_ptr<Message> message) {
  message->queue().push_back(message.get());
  ++in_flight_;
  core_->control().guarded([&] { progress(message->queue()); });
  return message;
}

template <class Action>
void IpcMessages::awaiting(const Message* awaited, const Message& message, Action&& action) {
  const GpuGuard guard(core_->gpu());
  check_not_captured(message.stream(), "a message of ipc");
  const std::shared_ptr<const Message*> reset(&awaited_, [](const Message** to) { *to = nullptr; });
  awaited_ = awaited;
  core_->control().guarded(action);
}

// Polling for a message from itself is not an error before that was sent: waiting is.
void IpcMessages::advance(const Message& message) {
  const bool overdue = running_ns() >= message.deadline_ns();
  awaiting(overdue ? &message : nullptr, message, [&] { core_->progress(); });
}

void IpcMessages::wait(const Message& message) {
  const auto done = [&] { return message.done(); };
  const auto blocker = [&] { return in_flight_ == 1 ? message.blocker() : nullptr; };
  awaiting(&message, message, [&] { core_->progress_until(done, blocker); });
}

void IpcMessages::drop(const Message& message) noexcept {
  core_->session().abort(std::uncaught_exceptions() > 0 ? "failed with an exception"
                                                        : "dropped a message before it was done");
  in_flight_ -= static_cast<int64_t>(std::erase(message.queue(), &message));
}

void IpcMessages::progress() {
  if (in_flight_ == 0) return;
  for (Outgoing& out : outgoing_) progress(out.queue);
  for (Incoming& in : incoming_) progress(in.queue);
}

// A deadline ends the wait of whoever waits for that message, and nothing else.
void IpcMessages::progress(Queue& queue) {
  const bool awaited = awaited_ != nullptr && &awaited_->queue() == &queue;
  while (!queue.empty()) {
    Message& front = *queue.front();
    if (!awaited && is_captured(front.stream())) return;  // its copies would go into that graph
    front.set_limit(awaited ? awaited_->deadline_ns() : kNever);
    if (!front.step()) return;
    front.set_done();
    queue.pop_front();
    --in_flight_;
  }
}

void IpcMessages::drain() noexcept {
  try {
    const GpuGuard guard(core_->gpu());
    // Where something is still in flight, the communicator is given up.
    if (!in_flight() && !core_->in_flight()) wait_until_taken();
    // The core's stream is waited for before memory goes: it stands for the callers' streams.
    for (int peer = 0; peer < core_->size(); ++peer) {
      for (int slot = 0; slot < kSlots; ++slot) {
        core_->message_taken(core_->rank(), peer, slot).hold(core_->stream());
        if (core_->control().broken() || outgoing_[static_cast<size_t>(peer)].taken == 0) continue;
        core_->message_taken(peer, core_->rank(), slot).hold(core_->stream());
      }
    }
  } catch (const std::exception&) {
    // The GPU itself has failed: nothing runs there any more.
  }
}

void IpcMessages::wait_until_taken() noexcept {
  try {
    core_->control().guarded([&] {
      for (int to = 0; to < core_->size(); ++to) {
        Outgoing& out = outgoing_[static_cast<size_t>(to)];
        while (out.taken < out.sent) {
          int64_t taken = 0;
          core_->control()
              .channel(IpcCore::kTaken)
              .recv({&taken, 1, Dtype::kI64}, to, 0,
                    {.deadline_ns = out.deadline_ns, .part_of = &out.last})
              ->wait();
          out.taken = taken + 1;
        }
      }
    });
  } catch (const std::exception&) {
    // The receiver is gone, or never wanted it.
  }
}

}  // namespace lockstep
