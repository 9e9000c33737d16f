#include "lockstep_gloo.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/transport/address.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "watched_transport.hpp"

struct LockstepGlooContext {
  std::shared_ptr<gloo::transport::Device> device;
  std::shared_ptr<gloo::transport::Context> connections;
  lockstep::gloo_module::Watch watch;
};

namespace lockstep::gloo_module {
namespace {

// Gloo's own algorithms use first bytes 1 to 8 of the 64-bit slot for theirs.
constexpr uint64_t kMessageSlots = uint64_t{0x40} << 56;

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

LockstepGlooStatus tell(LockstepGlooMessage* message, LockstepGlooStatus status, const char* text) {
  if (message != nullptr) {
    const size_t kept = std::min(std::strlen(text), sizeof(message->text) - 1);
    std::memcpy(message->text, text, kept);
    message->text[kept] = '\0';
  }
  return status;
}

// The one way out of the module: whatever Gloo throws ends here.
template <class Action>
LockstepGlooStatus guarded(LockstepGlooMessage* message, Action&& action) noexcept {
  const SignalsBlocked blocked(false);
  try {
    action();
    return LOCKSTEP_GLOO_OK;
  } catch (const Late& error) {
    return tell(message, LOCKSTEP_GLOO_LATE, error.what());
  } catch (const Aborted& error) {
    return tell(message, LOCKSTEP_GLOO_ABORTED, error.what());
  } catch (const std::exception& error) {
    return tell(message, LOCKSTEP_GLOO_FAILED, error.what());
  } catch (...) {
    return tell(message, LOCKSTEP_GLOO_FAILED, "an unknown exception");
  }
}

std::shared_ptr<TransferContext> begin(LockstepGlooContext* context, const LockstepGlooCall& call) {
  return std::make_shared<TransferContext>(
      std::make_shared<WatchedTransport>(context->connections, context->watch, call.deadline_ns));
}

LockstepGlooStatus create(int rank, int size, const char* address, int64_t connect_timeout_ms,
                          LockstepGlooClock clock, LockstepGlooContext** context,
                          LockstepGlooMessage* message) {
  return guarded(message, [&] {
    auto made = std::make_unique<LockstepGlooContext>();
    {
      const SignalsBlocked blocked(true);
      made->watch.start(clock);
      made->device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address));
    }
    made->connections = made->device->createContext(rank, size);
    made->connections->setTimeout(
        std::chrono::milliseconds(std::max<int64_t>(connect_timeout_ms / kConnectPatience, 1)));
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) made->connections->createPair(peer);
    }
    *context = made.release();
  });
}

LockstepGlooStatus address(LockstepGlooContext* context, int peer, void* bytes, size_t* length,
                           LockstepGlooMessage* message) {
  return guarded(message, [&] {
    const std::vector<char> own = context->connections->getPair(peer)->address().bytes();
    if (own.size() > LOCKSTEP_GLOO_MAX_ADDRESS) throw std::length_error("an address is too long");
    std::memcpy(bytes, own.data(), own.size());
    *length = own.size();
  });
}

LockstepGlooStatus connect(LockstepGlooContext* context, int peer, const void* bytes, size_t length,
                           LockstepGlooMessage* message) {
  return guarded(message, [&] {
    const auto* theirs = static_cast<const char*>(bytes);
    context->connections->getPair(peer)->connect(std::vector<char>(theirs, theirs + length));
  });
}

// Gloo asks for a type only to know its size.
template <class Element>
void set_output(gloo::AllreduceOptions& options, void* data, size_t count) {
  options.setOutput(static_cast<Element*>(data), count);
}

LockstepGlooStatus all_reduce(LockstepGlooContext* context, void* data, size_t count,
                              size_t element_bytes, LockstepGlooReduce reduce, void* user,
                              const LockstepGlooCall* call) {
  return guarded(call->message, [&] {
    gloo::AllreduceOptions options(begin(context, *call));
    switch (element_bytes) {
      case 1:
        set_output<uint8_t>(options, data, count);
        break;
      case 2:
        set_output<uint16_t>(options, data, count);
        break;
      case 4:
        set_output<uint32_t>(options, data, count);
        break;
      case 8:
        set_output<uint64_t>(options, data, count);
        break;
      default:
        throw std::invalid_argument("elements have 1, 2, 4 or 8 bytes");
    }
    // Named, so that no later Gloo chooses by size: the order of summation must not change.
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setReduceFunction(
        [=](void* out, const void* a, const void* b, size_t n) { reduce(user, out, a, b, n); });
    options.setTag(call->tag);
    gloo::allreduce(options);
  });
}

LockstepGlooStatus broadcast(LockstepGlooContext* context, void* data, size_t bytes, int root,
                             const LockstepGlooCall* call) {
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

LockstepGlooStatus all_gather(LockstepGlooContext* context, const void* input, size_t bytes,
                              void* output, const LockstepGlooCall* call) {
  return guarded(call->message, [&] {
    gloo::AllgatherOptions options(begin(context, *call));
    options.setInput(readable(input), bytes);
    options.setOutput(static_cast<uint8_t*>(output),
                      bytes * static_cast<size_t>(context->connections->size));
    options.setTag(call->tag);
    gloo::allgather(options);
  });
}

LockstepGlooStatus all_to_all(LockstepGlooContext* context, const void* input, size_t block_bytes,
                              void* output, const LockstepGlooCall* call) {
  return guarded(call->message, [&] {
    const size_t bytes = block_bytes * static_cast<size_t>(context->connections->size);
    gloo::AlltoallOptions options(begin(context, *call));
    options.setInput(readable(input), bytes);
    options.setOutput(static_cast<uint8_t*>(output), bytes);
    options.setTag(call->tag);
    gloo::alltoall(options);
  });
}

LockstepGlooStatus send(LockstepGlooContext* context, const void* data, size_t bytes, int to,
                        const LockstepGlooCall* call) {
  return guarded(call->message, [&] {
    const auto transfer = begin(context, *call);
    const auto buffer = transfer->createUnboundBuffer(readable(data), bytes);
    buffer->send(to, kMessageSlots | call->tag);
    buffer->waitSend();
  });
}

LockstepGlooStatus recv(LockstepGlooContext* context, void* data, size_t bytes, int from,
                        const LockstepGlooCall* call) {
  return guarded(call->message, [&] {
    const auto transfer = begin(context, *call);
    const auto buffer = transfer->createUnboundBuffer(data, bytes);
    buffer->recv(from, kMessageSlots | call->tag);
    buffer->waitRecv();
  });
}

void abort(LockstepGlooContext* context) {
  guarded(nullptr, [&] {
    context->watch.abort();
    for (int peer = 0; peer < context->connections->size; ++peer) {
      if (peer == context->connections->rank) continue;
      const auto& pair = context->connections->getPair(peer);
      if (pair) pair->close();
    }
  });
}

void destroy(LockstepGlooContext* context) {
  guarded(nullptr, [&] { delete context; });
}

constexpr LockstepGlooApi kApi = {
    LOCKSTEP_GLOO_ABI, create,     address, connect, all_reduce, broadcast,
    all_gather,        all_to_all, send,    recv,    abort,      destroy};

}  // namespace
}  // namespace lockstep::gloo_module

__attribute__((visibility("default"))) const LockstepGlooApi* lockstep_gloo_api(void) {
  return &lockstep::gloo_module::kApi;
}
