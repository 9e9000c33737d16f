#pragma once

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_set>

// Gloo waits for each piece of a transfer with the full timeout again, and nobody can end a wait
// from outside. These decorators give a whole transfer one deadline, and let another thread end it.
// Gloo's own timeout cannot serve as the deadline: it counts the time in which this process was
// stopped (see Note [Running clock]), and when it passes, Gloo closes the connections to all peers.

namespace lockstep::gloo_module {

/// A transfer whose deadline passed.
struct Late : std::runtime_error {
  Late() : std::runtime_error("the deadline passed") {}
};

/// A transfer that abort() ended.
struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};

class WatchedBuffer;

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
  WatchedBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, Watch& watch,
                int64_t deadline_ns);
  ~WatchedBuffer() override;

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override;
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override;
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }

  /// Ends a wait, or the next one, in Late if the deadline has passed. The watch's thread calls it.
  void end_if_late(int64_t now_ns);

  void send(int to, uint64_t slot, size_t offset, size_t bytes) override {
    inner_->send(to, slot, offset, bytes);
  }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override {
    inner_->recv(from, slot, offset, bytes);
  }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    inner_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  bool finish(bool waited) const;

  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
  Watch& watch_;
  const int64_t deadline_ns_;
  std::atomic<bool> late_ = false;
};

/// The transport of one transfer: another one's connections, with this transfer's deadline.
class WatchedTransport final : public gloo::transport::Context {
 public:
  WatchedTransport(std::shared_ptr<gloo::transport::Context> inner, Watch& watch,
                   int64_t deadline_ns)
      : Context(inner->rank, inner->size),
        inner_(std::move(inner)),
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

}  // namespace lockstep::gloo_module
