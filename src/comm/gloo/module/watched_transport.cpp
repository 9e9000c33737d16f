#include "watched_transport.hpp"

#include <algorithm>

#include "lockstep/clock.hpp"

namespace lockstep::gloo_module {

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

template <class Wait>
bool WatchedBuffer::wait(Wait&& wait_inner) {
  const int64_t left_ms = (deadline_ns_ - monotonic_ns()) / 1'000'000;
  try {
    if (!wait_inner(std::chrono::milliseconds(std::max<int64_t>(left_ms, 1)))) throw Aborted();
  } catch (const Aborted&) {
    throw;
  } catch (const std::exception&) {
    // Gloo has no type for a timeout of its own.
    if (monotonic_ns() >= deadline_ns_ - 1'000'000) throw Late();
    throw;
  }
  return true;
}

bool WatchedBuffer::waitRecv(int* rank, std::chrono::milliseconds) {
  return wait([&](std::chrono::milliseconds left) { return inner_->waitRecv(rank, left); });
}

bool WatchedBuffer::waitSend(int* rank, std::chrono::milliseconds) {
  return wait([&](std::chrono::milliseconds left) { return inner_->waitSend(rank, left); });
}

std::unique_ptr<gloo::transport::UnboundBuffer> WatchedTransport::createUnboundBuffer(
    void* data, size_t bytes) {
  return std::make_unique<WatchedBuffer>(inner_->createUnboundBuffer(data, bytes), watch_,
                                         deadline_ns_);
}

}  // namespace lockstep::gloo_module
