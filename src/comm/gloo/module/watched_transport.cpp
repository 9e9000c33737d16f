#include "watched_transport.hpp"

namespace lockstep::gloo_module {
namespace {

constexpr std::chrono::milliseconds kLook(50);  // a deadline is noticed within this
constexpr std::chrono::milliseconds kNoTimeout(std::chrono::hours(24 * 365));

}  // namespace

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

WatchedBuffer::WatchedBuffer(std::unique_ptr<gloo::transport::UnboundBuffer> inner, Watch& watch,
                             int64_t deadline_ns)
    : UnboundBuffer(inner->ptr, inner->size),
      inner_(std::move(inner)),
      watch_(watch),
      deadline_ns_(deadline_ns) {
  watch_.add(this);
}

WatchedBuffer::~WatchedBuffer() {
  watch_.remove(this);
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
  return std::make_unique<WatchedBuffer>(inner_->createUnboundBuffer(data, bytes), watch_,
                                         deadline_ns_);
}

}  // namespace lockstep::gloo_module
