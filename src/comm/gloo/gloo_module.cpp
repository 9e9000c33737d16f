#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/context.h>
#include <gloo/reduce.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/loop.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/network/module_status.hpp"

// Gloo waits for each part of a transfer with the full timeout again, and nobody can end a wait
// from outside. These decorators give a whole transfer one deadline, and let another thread end it.
// Gloo's own timeout cannot serve as the deadline: it counts the time in which this process was
// stopped (see Note [Running clock]), and when it passes, Gloo closes the connections to all peers.

namespace lockstep::gloo_module {

constexpr std::chrono::milliseconds kLook(50);  // a deadline is noticed within this
constexpr std::chrono::milliseconds kNoTimeout(std::chrono::hours(24 * 365));

using transport_module::Aborted;
using transport_module::Late;

class WatchedBuffer;

/// Note [Gloo's loop].
///
/// A thread of Gloo's, its loop, reads all sockets and finishes what could not be written at once.
/// A thread that begins a send or a receive writes to a socket, too, and holds that connection's
/// lock. The loop only tries the lock: while another thread has it, the loop asks the system for
/// events again and again, and gets the same one. If both threads share a core, as those of a rank
/// that is pinned to one do, it does so until its time slice ends, some 4 ms, in which the other
/// thread cannot let go of the lock.
///
/// So the loop itself begins all sends and receives; other threads only tell it which. The loop
/// must not wait for a lock whose owner waits for the loop, as a thread does that closes a
/// connection: before that, stop() ends these calls.
class LoopCalls final : public gloo::transport::tcp::Handler {
 public:
  explicit LoopCalls(std::shared_ptr<gloo::transport::tcp::Device> device);
  ~LoopCalls() override;
  LoopCalls(const LoopCalls&) = delete;
  LoopCalls& operator=(const LoopCalls&) = delete;

  /// The loop makes this call soon, after those before it.
  void post(WatchedBuffer* buffer, std::function<void()> call);
  void drop(const WatchedBuffer* buffer);  ///< none of the buffer's calls is made after this
  void stop();                             ///< no call is made after this
  void handleEvents(int events) override;

 private:
  struct Posted {
    WatchedBuffer* buffer;
    std::function<void()> run;
  };

  const std::shared_ptr<gloo::transport::tcp::Device> device_;
  const int event_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable made_;
  std::deque<Posted> calls_;
  const WatchedBuffer* now_ = nullptr;  // whose call is being made
  bool notified_ = false;               // the loop knows that there are calls
  bool stopped_ = false;
};

/// The buffers that are in use now. A thread wakes whoever waits on one whose deadline has passed;
/// abort() wakes all of them.
class Watch {
 public:
  using Clock = int64_t (*)();

  Watch() = default;
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void start(Clock clock);          ///< once, before the first add()
  void add(WatchedBuffer* buffer);  ///< throws Aborted after abort()
  void remove(WatchedBuffer* buffer);
  void abort();

 private:
  void look_for_late_buffers();

  Clock clock_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::condition_variable stop_;
  bool stopping_ = false;
  bool aborted_ = false;
  std::unordered_set<WatchedBuffer*> buffers_;
  std::thread thread_;
};

/// A buffer of another transport, every wait on which ends at the deadline or at abort().
class WatchedBuffer final : public gloo::transport::UnboundBuffer {
 public:
  WatchedBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, LoopCalls& loop,
                Watch& watch, int64_t deadline_ns);
  ~WatchedBuffer() override;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }

  /// Ends a wait, or the next one, in Late if the deadline has passed. The watch's thread calls it.
  void end_if_late(int64_t now_ns);

  /// Ends a wait, or the next one, with these words: the loop could not begin a call.
  void fail(const std::string& what);

  void send(int to, uint64_t slot, size_t offset, size_t bytes) override {
    loop_.post(this, [=, this] { inner_->send(to, slot, offset, bytes); });
  }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override {
    loop_.post(this, [=, this] { inner_->recv(from, slot, offset, bytes); });
  }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    loop_.post(this, [=, this] { inner_->recv(from, slot, offset, bytes); });
  }

 private:
  bool finish(bool waited) const;

  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
  LoopCalls& loop_;
  Watch& watch_;
  const int64_t deadline_ns_;
  std::atomic<bool> late_ = false;
  std::string failure_;  // before failed_
  std::atomic<bool> failed_ = false;
};

/// The transport of one transfer: another one's connections, with this transfer's deadline.
class WatchedTransport final : public gloo::transport::Context {
 public:
  WatchedTransport(std::shared_ptr<gloo::transport::Context> inner, LoopCalls& loop, Watch& watch,
                   int64_t deadline_ns)
      : Context(inner->rank, inner->size),
        inner_(std::move(inner)),
        loop_(loop),
        watch_(watch),
        deadline_ns_(deadline_ns) {}

  std::unique_ptr<gloo::transport::Pair>& getPair(int peer) override {
    return inner_->getPair(peer);
  }
  std::unique_ptr<gloo::transport::Pair>& createPair(int peer) override {
    return inner_->createPair(peer);
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data,
                                                                      size_t bytes) override;

 private:
  std::shared_ptr<gloo::transport::Context> inner_;
  LoopCalls& loop_;
  Watch& watch_;
  const int64_t deadline_ns_;
};

/// What Gloo's algorithms take, around one transfer's transport.
class TransferContext final : public gloo::Context {
 public:
  explicit TransferContext(std::shared_ptr<WatchedTransport> transport)
      : Context(transport->rank, transport->size) {
    transportContext_ = std::move(transport);
    setTimeout(std::chrono::hours(1));  // never reached: every wait obeys the deadline
  }
};

LoopCalls::LoopCalls(std::shared_ptr<gloo::transport::tcp::Device> device)
    : device_(std::move(device)), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_ < 0) throw std::runtime_error("no event descriptor");
  device_->registerDescriptor(event_, EPOLLIN, this);
}

LoopCalls::~LoopCalls() {
  device_->unregisterDescriptor(event_, this);
  ::close(event_);
}

void LoopCalls::post(WatchedBuffer* buffer, std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) throw Aborted();
    calls_.push_back({buffer, std::move(call)});
    if (std::exchange(notified_, true)) return;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
}

void LoopCalls::drop(const WatchedBuffer* buffer) {
  std::unique_lock lock(mutex_);
  std::erase_if(calls_, [&](const Posted& call) { return call.buffer == buffer; });
  made_.wait(lock, [&] { return now_ != buffer; });
}

void LoopCalls::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  calls_.clear();
  made_.wait(lock, [&] { return now_ == nullptr; });
}

void LoopCalls::handleEvents(int) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t taken = ::read(event_, &count, sizeof count);
  std::unique_lock lock(mutex_);
  notified_ = false;
  while (!calls_.empty()) {
    const Posted call = std::move(calls_.front());
    calls_.pop_front();
    now_ = call.buffer;
    lock.unlock();
    try {
      call.run();
    } catch (const std::exception& error) {
      call.buffer->fail(error.what());
    }
    lock.lock();
    now_ = nullptr;
    made_.notify_all();
  }
}

Watch::~Watch() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stop_.notify_all();
  }
  thread_.join();
}

void Watch::start(Clock clock) {
  clock_ = clock;
  thread_ = std::thread([this] { look_for_late_buffers(); });
}

void Watch::look_for_late_buffers() {
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, kLook, [this] { return stopping_; })) {
    const int64_t now_ns = clock_();
    for (WatchedBuffer* buffer : buffers_) buffer->end_if_late(now_ns);
  }
}

void Watch::add(WatchedBuffer* buffer) {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw Aborted();
  buffers_.insert(buffer);
}

void Watch::remove(WatchedBuffer* buffer) {
  const std::lock_guard lock(mutex_);
  buffers_.erase(buffer);
}

// Gloo remembers an abort until the next wait on that buffer, so that none can slip past this.
void Watch::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (WatchedBuffer* buffer : buffers_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

WatchedBuffer::WatchedBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, LoopCalls& loop,
                             Watch& watch, int64_t deadline_ns)
    : UnboundBuffer(inner->ptr, inner->size),
      inner_(std::move(inner)),
      loop_(loop),
      watch_(watch),
      deadline_ns_(deadline_ns) {
  watch_.add(this);
}

WatchedBuffer::~WatchedBuffer() {
  loop_.drop(this);
  watch_.remove(this);
}

void WatchedBuffer::fail(const std::string& what) {
  failure_ = what;
  failed_ = true;
  abortWaitRecv();
  abortWaitSend();
}

void WatchedBuffer::end_if_late(int64_t now_ns) {
  if (now_ns < deadline_ns_ || late_.exchange(true)) return;
  abortWaitRecv();
  abortWaitSend();
}

// An aborted wait of Gloo's returns false.
bool WatchedBuffer::finish(bool waited) const {
  if (waited) return true;
  if (late_) throw Late();
  if (failed_) throw std::runtime_error(failure_);
  throw Aborted();
}

bool WatchedBuffer::waitRecv(int* rank, std::chrono::milliseconds) {
  return finish(inner_->waitRecv(rank, kNoTimeout));
}

bool WatchedBuffer::waitSend(int* rank, std::chrono::milliseconds) {
  return finish(inner_->waitSend(rank, kNoTimeout));
}

std::unique_ptr<gloo::transport::UnboundBuffer> WatchedTransport::createUnboundBuffer(
    void* data, size_t bytes) {
  return std::make_unique<WatchedBuffer>(inner_->createUnboundBuffer(data, bytes), loop_, watch_,
                                         deadline_ns_);
}

}  // namespace lockstep::gloo_module

struct LockstepTransportContext {
  std::shared_ptr<gloo::transport::tcp::Device> device;
  std::shared_ptr<gloo::transport::Context> connections;
  std::unique_ptr<lockstep::gloo_module::LoopCalls> loop;
  lockstep::gloo_module::Watch watch;
};

struct LockstepTransportExchange {
  std::shared_ptr<gloo::Context> transfer;
  std::unique_ptr<gloo::transport::UnboundBuffer> from;
  std::unique_ptr<gloo::transport::UnboundBuffer> to;
  int sends = 0;
  int receives = 0;
};

namespace lockstep::gloo_module {
namespace {

// Gloo's own algorithms use first bytes 1 to 8 of the 64-bit slot for theirs.
constexpr uint64_t kMessageSlots = uint64_t{0x40} << 56;
constexpr uint64_t kExchangeSlots = uint64_t{0x41} << 56;
constexpr uint64_t kPartSlots = uint64_t{0x42} << 56;

// Gloo waits five times its timeout for a connection.
constexpr int64_t kConnectPatience = 5;

// Keeps signals from this thread for a while, and from threads it starts: Gloo writes to sockets
// that a peer may have closed, and its own threads must not run the program's handlers.
class SignalsBlocked {
 public:
  explicit SignalsBlocked(bool all) {
    sigset_t blocked;
    sigset_t pending;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGPIPE);
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    if (all) sigfillset(&blocked);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const timespec at_once{};
    if (!was_pending_) sigtimedwait(&pipe, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
  bool was_pending_ = false;
};

template <class Action>
LockstepTransportStatus guarded(LockstepTransportMessage* message, Action&& action) noexcept {
  const SignalsBlocked blocked(false);
  return transport_module::guarded(message, action);
}

std::shared_ptr<TransferContext> begin(LockstepTransportContext* context,
                                       const LockstepTransportCall& call) {
  return std::make_shared<TransferContext>(std::make_shared<WatchedTransport>(
      context->connections, *context->loop, context->watch, call.deadline_ns));
}

LockstepTransportStatus create(int rank, int size, const char* address, int64_t connect_timeout_ms,
                               LockstepTransportClock clock, LockstepTransportContext** context,
                               LockstepTransportMessage* message) {
  return guarded(message, [&] {
    auto made = std::make_unique<LockstepTransportContext>();
    {
      const SignalsBlocked blocked(true);
      made->watch.start(clock);
      made->device = std::dynamic_pointer_cast<gloo::transport::tcp::Device>(
          gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address)));
    }
    made->loop = std::make_unique<LoopCalls>(made->device);
    made->connections = made->device->createContext(rank, size);
    made->connections->setTimeout(
        std::chrono::milliseconds(std::max<int64_t>(connect_timeout_ms / kConnectPatience, 1)));
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) made->connections->createPair(peer);
    }
    *context = made.release();
  });
}

LockstepTransportStatus address(LockstepTransportContext* context, int peer, void* bytes,
                                size_t* length, LockstepTransportMessage* message) {
  return guarded(message, [&] {
    const std::vector<char> own = context->connections->getPair(peer)->address().bytes();
    if (own.size() > LOCKSTEP_TRANSPORT_MAX_ADDRESS)
      throw std::length_error("an address is too long");
    std::memcpy(bytes, own.data(), own.size());
    *length = own.size();
  });
}

LockstepTransportStatus connect(LockstepTransportContext* context, int peer, const void* bytes,
                                size_t length, LockstepTransportMessage* message) {
  return guarded(message, [&] {
    const auto* theirs = static_cast<const char*>(bytes);
    context->connections->getPair(peer)->connect(std::vector<char>(theirs, theirs + length));
  });
}

// Gloo asks for a type only to know its size.
template <class Options>
void set_output(Options& options, void* data, size_t count, size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return options.setOutput(static_cast<uint8_t*>(data), count);
    case 2:
      return options.setOutput(static_cast<uint16_t*>(data), count);
    case 4:
      return options.setOutput(static_cast<uint32_t*>(data), count);
    case 8:
      return options.setOutput(static_cast<uint64_t*>(data), count);
    default:
      throw std::invalid_argument("elements have 1, 2, 4 or 8 bytes");
  }
}

LockstepTransportStatus all_reduce(LockstepTransportContext* context, void* data, size_t count,
                                   size_t element_bytes, LockstepTransportReduce reduce, void* user,
                                   const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    gloo::AllreduceOptions options(begin(context, *call));
    set_output(options, data, count, element_bytes);
    // Named, so that no later Gloo chooses by size: the order of summation must not change.
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setReduceFunction(
        [=](void* out, const void* a, const void* b, size_t n) { reduce(user, out, a, b, n); });
    options.setTag(call->tag);
    gloo::allreduce(options);
  });
}

LockstepTransportStatus broadcast(LockstepTransportContext* context, void* data, size_t bytes,
                                  int root, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    gloo::BroadcastOptions options(begin(context, *call));
    options.setOutput(static_cast<uint8_t*>(data), bytes);
    options.setRoot(root);
    options.setTag(call->tag);
    gloo::broadcast(options);
  });
}

// Gloo only reads its inputs, but takes them as buffers that could be written.
uint8_t* readable(const void* data) {
  return static_cast<uint8_t*>(const_cast<void*>(data));
}

LockstepTransportStatus all_gather(LockstepTransportContext* context, const void* input,
                                   size_t bytes, void* output, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    gloo::AllgatherOptions options(begin(context, *call));
    const auto own_block = static_cast<size_t>(context->connections->rank) * bytes;
    // Without an input, Gloo takes what the output holds already.
    if (input != static_cast<uint8_t*>(output) + own_block) {
      options.setInput(readable(input), bytes);
    }
    options.setOutput(static_cast<uint8_t*>(output),
                      bytes * static_cast<size_t>(context->connections->size));
    options.setTag(call->tag);
    gloo::allgather(options);
  });
}

LockstepTransportStatus reduce(LockstepTransportContext* context, void* data, size_t count,
                               size_t element_bytes, int root, LockstepTransportReduce reduce,
                               void* user, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    gloo::ReduceOptions options(begin(context, *call));
    set_output(options, data, count, element_bytes);
    options.setRoot(root);
    options.setReduceFunction(
        [=](void* out, const void* a, const void* b, size_t n) { reduce(user, out, a, b, n); });
    options.setTag(call->tag);
    gloo::reduce(options);
  });
}

// Every rank begins with its right neighbour, so that no rank is everybody's first.
std::unique_ptr<LockstepTransportExchange> begin_blocks(
    LockstepTransportContext* context, const void* input, const LockstepTransportBlock* given,
    void* output, const LockstepTransportBlock* taken, uint64_t slot,
    const LockstepTransportCall& call) {
  const int rank = context->connections->rank;
  const int size = context->connections->size;
  const auto end_of = [size](const LockstepTransportBlock* blocks) {
    size_t end = 0;
    for (int peer = 0; peer < size; ++peer) {
      if (blocks[peer].bytes > 0) end = std::max(end, blocks[peer].offset + blocks[peer].bytes);
    }
    return end;
  };
  auto exchange = std::make_unique<LockstepTransportExchange>();
  exchange->transfer = begin(context, call);
  exchange->from = exchange->transfer->createUnboundBuffer(readable(input), end_of(given));
  exchange->to = exchange->transfer->createUnboundBuffer(output, end_of(taken));
  for (int step = 1; step < size; ++step) {
    const int right = (rank + step) % size;
    const int left = (rank + size - step) % size;
    if (left != rank && taken[left].bytes > 0) {
      exchange->to->recv(left, slot, taken[left].offset, taken[left].bytes);
      ++exchange->receives;
    }
    if (right != rank && given[right].bytes > 0) {
      exchange->from->send(right, slot, given[right].offset, given[right].bytes);
      ++exchange->sends;
    }
  }
  return exchange;
}

void end_blocks(LockstepTransportExchange& exchange) {
  for (; exchange.receives > 0; --exchange.receives) exchange.to->waitRecv();
  for (; exchange.sends > 0; --exchange.sends) exchange.from->waitSend();
}

LockstepTransportStatus exchange(LockstepTransportContext* context, const void* input,
                                 const LockstepTransportBlock* given, void* output,
                                 const LockstepTransportBlock* taken,
                                 const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    end_blocks(
        *begin_blocks(context, input, given, output, taken, kExchangeSlots | call->tag, *call));
  });
}

LockstepTransportStatus begin_exchange(LockstepTransportContext* context, const void* input,
                                       const LockstepTransportBlock* given, void* output,
                                       const LockstepTransportBlock* taken, uint32_t part,
                                       const LockstepTransportCall* call,
                                       LockstepTransportExchange** exchange) {
  return guarded(call->message, [&] {
    const uint64_t slot = kPartSlots | uint64_t{part} << 32 | call->tag;
    *exchange = begin_blocks(context, input, given, output, taken, slot, *call).release();
  });
}

LockstepTransportStatus end_exchange(LockstepTransportExchange* exchange,
                                     LockstepTransportMessage* message) {
  return guarded(message, [&] { end_blocks(*exchange); });
}

void drop_exchange(LockstepTransportExchange* exchange) {
  guarded(nullptr, [&] { delete exchange; });
}

LockstepTransportStatus send(LockstepTransportContext* context, const void* data, size_t bytes,
                             int to, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    const auto transfer = begin(context, *call);
    const auto buffer = transfer->createUnboundBuffer(readable(data), bytes);
    buffer->send(to, kMessageSlots | call->tag);
    buffer->waitSend();
  });
}

LockstepTransportStatus recv(LockstepTransportContext* context, void* data, size_t bytes, int from,
                             const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    const auto transfer = begin(context, *call);
    const auto buffer = transfer->createUnboundBuffer(data, bytes);
    buffer->recv(from, kMessageSlots | call->tag);
    buffer->waitRecv();
  });
}

void abort(LockstepTransportContext* context) {
  guarded(nullptr, [&] {
    context->watch.abort();
    context->loop->stop();
    for (int peer = 0; peer < context->connections->size; ++peer) {
      if (peer == context->connections->rank) continue;
      const auto& pair = context->connections->getPair(peer);
      if (pair) pair->close();
    }
  });
}

void destroy(LockstepTransportContext* context) {
  guarded(nullptr, [&] { delete context; });
}

constexpr LockstepTransportApi kApi = {LOCKSTEP_TRANSPORT_ABI,
                                       create,
                                       address,
                                       connect,
                                       all_reduce,
                                       broadcast,
                                       all_gather,
                                       reduce,
                                       exchange,
                                       begin_exchange,
                                       end_exchange,
                                       drop_exchange,
                                       send,
                                       recv,
                                       abort,
                                       destroy,
                                       nullptr};

}  // namespace
}  // namespace lockstep::gloo_module

__attribute__((visibility("default"))) const LockstepTransportApi* lockstep_transport_api(void) {
  return &lockstep::gloo_module::kApi;
}
