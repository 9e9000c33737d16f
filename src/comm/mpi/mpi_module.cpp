#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/mpi/mpi_process.hpp"
#include "comm/network/module_status.hpp"

// Note [Collectives of messages]
//
// Everything here is made of MPI's messages between two ranks, on one communicator of all ranks.
// MPI's own collectives are not used:
//   - MPI may not be asked to cancel a collective. One that a dead rank holds up would keep its
//     buffers for ever, and their owner could never free them.
//   - Each group would need an MPI communicator. Making one is a collective without a deadline.
//   - MPI does not promise that a reduction has the same bits on all ranks or in every run, and has
//     no bfloat16. lockstep moves slices, and adds them itself in the order of the ranks.
// Open MPI's non-blocking collectives send the same messages.
//
// Nothing is sent before the ranks have agreed over TCP that they make the same call, and a long
// message waits until its receiver is ready. So a call that fails before its data moves leaves no
// message behind that MPI would still read or write.

struct LockstepTransportContext {
  // A rank of the group, as MPI sees it.
  struct Peer {
    int32_t mpi_rank = -1;
    int32_t tags = 0;
  };

  int rank = 0;
  int size = 1;
  LockstepTransportClock clock = nullptr;
  Peer own;
  std::vector<Peer> peers;  // [group rank]
  std::atomic<bool> aborted = false;
};

namespace lockstep::mpi_module {
namespace {

constexpr int kTagsPerGroup = 3;             // see Tag
constexpr size_t kLongestMessage = 1 << 30;  // MPI counts in int: more bytes go in several
constexpr size_t kEagerBytes = 2048;         // less than any MPI sends without asking the receiver
constexpr size_t kTreeBytes = 1 << 16;       // a broadcast of more is divided over the ranks

// What a message is for. Each group has its own tags, which its receivers choose.
enum Tag : int { kCollective = 0, kMessage = 1, kReady = 2 };

/// Messages that are under way together.
class Transfer {
 public:
  Transfer(LockstepTransportContext& context, int64_t deadline_ns)
      : context_(context), deadline_ns_(deadline_ns) {
    if (context.aborted) throw Aborted();
  }
  ~Transfer() { mpi_.settle(receives_, sends_); }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void send(int to, Tag tag, const void* data, size_t bytes) {
    const auto& peer = context_.peers[static_cast<size_t>(to)];
    const auto* at = static_cast<const char*>(data);
    for (size_t sent = 0, part = 0; sent < bytes || sent == 0; sent += part) {
      part = std::min(bytes - sent, kLongestMessage);
      mpi_.call([&] {
        return MPI_Isend(at + sent, static_cast<int>(part), MPI_BYTE, peer.mpi_rank,
                         peer.tags + tag, mpi_.comm(), &sends_.emplace_back(MPI_REQUEST_NULL));
      });
      if (part == 0) return;
    }
  }

  void recv(int from, Tag tag, void* data, size_t bytes) {
    const auto& peer = context_.peers[static_cast<size_t>(from)];
    auto* at = static_cast<char*>(data);
    for (size_t received = 0, part = 0; received < bytes || received == 0; received += part) {
      part = std::min(bytes - received, kLongestMessage);
      mpi_.call([&] {
        return MPI_Irecv(at + received, static_cast<int>(part), MPI_BYTE, peer.mpi_rank,
                         context_.own.tags + tag, mpi_.comm(),
                         &receives_.emplace_back(MPI_REQUEST_NULL));
      });
      if (part == 0) return;
    }
  }

  void wait() {
    const auto stop = [this] {
      if (context_.aborted) throw Aborted();
      if (context_.clock() >= deadline_ns_) throw Late();
    };
    mpi_.wait(receives_, stop);
    mpi_.wait(sends_, stop);
    receives_.clear();
    sends_.clear();
  }

 private:
  MpiProcess& mpi_ = MpiProcess::get();
  LockstepTransportContext& context_;
  const int64_t deadline_ns_;
  std::vector<MPI_Request> receives_;
  std::vector<MPI_Request> sends_;
};

LockstepTransportStatus create(int rank, int size, const char*, int64_t connect_timeout_ms,
                               LockstepTransportClock clock, LockstepTransportContext** context,
                               LockstepTransportMessage* message) {
  return guarded(message, [&] {
    MpiProcess& mpi = MpiProcess::get();
    const int64_t deadline_ns = clock() + connect_timeout_ms * 1'000'000;
    mpi.start([&] { return clock() >= deadline_ns; });
    if (mpi.size() < size) {
      char library[MPI_MAX_LIBRARY_VERSION_STRING] = {};
      int length = 0;
      MPI_Get_library_version(library, &length);
      const std::string version(library, std::find(library, library + length, ','));
      throw std::runtime_error("there are " + std::to_string(size) + " ranks, but " + version +
                               " knows " + std::to_string(mpi.size()) +
                               ": another MPI has started them, or none");
    }
    auto made = std::make_unique<LockstepTransportContext>();
    made->rank = rank;
    made->size = size;
    made->clock = clock;
    made->own = {mpi.rank(), mpi.take_tags(kTagsPerGroup)};
    made->peers.resize(static_cast<size_t>(size));
    *context = made.release();
  });
}

LockstepTransportStatus address(LockstepTransportContext* context, int, void* bytes, size_t* length,
                                LockstepTransportMessage*) {
  std::memcpy(bytes, &context->own, sizeof context->own);
  *length = sizeof context->own;
  return LOCKSTEP_TRANSPORT_OK;
}

LockstepTransportStatus connect(LockstepTransportContext* context, int peer, const void* bytes,
                                size_t length, LockstepTransportMessage* message) {
  return guarded(message, [&] {
    auto& theirs = context->peers[static_cast<size_t>(peer)];
    if (length != sizeof theirs) throw std::runtime_error("its address is not one of MPI");
    std::memcpy(&theirs, bytes, length);
    if (theirs.mpi_rank < 0 || theirs.mpi_rank >= MpiProcess::get().size()) {
      throw std::runtime_error("MPI has no rank " + std::to_string(theirs.mpi_rank));
    }
  });
}

// Every rank begins with its right neighbour, so that no rank is everybody's first.
void begin_blocks(Transfer& transfer, const LockstepTransportContext& context, const void* input,
                  const LockstepTransportBlock* given, void* output,
                  const LockstepTransportBlock* taken) {
  for (int step = 1; step < context.size; ++step) {
    const int left = (context.rank + context.size - step) % context.size;
    const auto& block = taken[left];
    if (block.bytes == 0) continue;
    transfer.recv(left, kCollective, static_cast<char*>(output) + block.offset, block.bytes);
  }
  for (int step = 1; step < context.size; ++step) {
    const int right = (context.rank + step) % context.size;
    const auto& block = given[right];
    if (block.bytes == 0) continue;
    transfer.send(right, kCollective, static_cast<const char*>(input) + block.offset, block.bytes);
  }
}

LockstepTransportStatus exchange(LockstepTransportContext* context, const void* input,
                                 const LockstepTransportBlock* given, void* output,
                                 const LockstepTransportBlock* taken,
                                 const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    Transfer transfer(*context, call->deadline_ns);
    begin_blocks(transfer, *context, input, given, output, taken);
    transfer.wait();
  });
}

LockstepTransportStatus all_gather(LockstepTransportContext* context, const void* input,
                                   size_t bytes, void* output, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    const auto ranks = static_cast<size_t>(context->size);
    std::vector<LockstepTransportBlock> taken;
    for (size_t peer = 0; peer < ranks; ++peer) taken.push_back({peer * bytes, bytes});
    char* const own = static_cast<char*>(output) + taken[static_cast<size_t>(context->rank)].offset;
    if (own != input) std::memcpy(own, input, bytes);
    const std::vector<LockstepTransportBlock> given(ranks, {0, bytes});
    Transfer transfer(*context, call->deadline_ns);
    begin_blocks(transfer, *context, input, given.data(), output, taken.data());
    transfer.wait();
  });
}

// A binomial tree: a rank that has the data sends it to the rank at `distance`, then at half of it.
void broadcast_by_tree(LockstepTransportContext& context, void* data, size_t bytes, int root,
                       int64_t deadline_ns) {
  const int size = context.size;
  const int relative = (context.rank + size - root) % size;
  int distance = 1;
  while (distance < size && (relative & distance) == 0) distance *= 2;
  if (relative != 0) {
    Transfer transfer(context, deadline_ns);
    transfer.recv((context.rank + size - distance) % size, kCollective, data, bytes);
    transfer.wait();
  }
  Transfer transfer(context, deadline_ns);
  for (distance /= 2; distance > 0; distance /= 2) {
    if (relative + distance < size) {
      transfer.send((context.rank + distance) % size, kCollective, data, bytes);
    }
  }
  transfer.wait();
}

// The root gives each rank a slice, which that one gives to all: no rank sends the whole twice.
void broadcast_by_slices(LockstepTransportContext& context, void* data, size_t bytes, int root,
                         int64_t deadline_ns) {
  const auto ranks = static_cast<size_t>(context.size);
  const LockstepTransportBlock none{0, 0};
  std::vector<LockstepTransportBlock> slices;
  for (size_t peer = 0; peer < ranks; ++peer) {
    const size_t begin = bytes / ranks * peer + std::min(peer, bytes % ranks);
    slices.push_back({begin, bytes / ranks + (peer < bytes % ranks ? 1 : 0)});
  }
  const LockstepTransportBlock own = slices[static_cast<size_t>(context.rank)];
  const bool is_root = context.rank == root;
  const std::vector<LockstepTransportBlock> nothing(ranks, none);
  {
    std::vector<LockstepTransportBlock> from_root(ranks, none);
    if (!is_root) from_root[static_cast<size_t>(root)] = own;
    Transfer transfer(context, deadline_ns);
    begin_blocks(transfer, context, data, is_root ? slices.data() : nothing.data(), data,
                 from_root.data());
    transfer.wait();
  }
  // The root has all slices, and gives each of the others its own.
  std::vector<LockstepTransportBlock> given(ranks, own);
  given[static_cast<size_t>(root)] = none;
  Transfer transfer(context, deadline_ns);
  begin_blocks(transfer, context, data, given.data(), data,
               is_root ? nothing.data() : slices.data());
  transfer.wait();
}

LockstepTransportStatus broadcast(LockstepTransportContext* context, void* data, size_t bytes,
                                  int root, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    const bool divided = bytes > kTreeBytes && context->size > 2;
    (divided ? broadcast_by_slices : broadcast_by_tree)(*context, data, bytes, root,
                                                        call->deadline_ns);
  });
}

LockstepTransportStatus send(LockstepTransportContext* context, const void* data, size_t bytes,
                             int to, const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    Transfer transfer(*context, call->deadline_ns);
    if (bytes > kEagerBytes) {
      transfer.recv(to, kReady, nullptr, 0);
      transfer.wait();
    }
    transfer.send(to, kMessage, data, bytes);
    transfer.wait();
  });
}

LockstepTransportStatus recv(LockstepTransportContext* context, void* data, size_t bytes, int from,
                             const LockstepTransportCall* call) {
  return guarded(call->message, [&] {
    Transfer transfer(*context, call->deadline_ns);
    transfer.recv(from, kMessage, data, bytes);
    if (bytes > kEagerBytes) transfer.send(from, kReady, nullptr, 0);
    transfer.wait();
  });
}

void abort(LockstepTransportContext* context) {
  context->aborted = true;
  MpiProcess::get().note_failure();
}

void destroy(LockstepTransportContext* context) {
  delete context;
}

LockstepTransportStatus announce(void* bytes, size_t length, LockstepTransportClock clock,
                                 int64_t deadline_ns, LockstepTransportMessage* message) {
  return guarded(message, [&] {
    MpiProcess& mpi = MpiProcess::get();
    const auto late = [&] { return clock() >= deadline_ns; };
    mpi.start(late);
    std::vector<MPI_Request> requests(1, MPI_REQUEST_NULL);
    std::vector<MPI_Request> none;
    mpi.call([&] {
      return MPI_Ibcast(bytes, static_cast<int>(length), MPI_BYTE, 0, mpi.comm(), requests.data());
    });
    try {
      mpi.wait(requests, [&] {
        if (late()) throw Late();
      });
    } catch (const Late&) {
      mpi.settle(none, requests);
      throw;
    }
  });
}

constexpr LockstepTransportApi kApi = {LOCKSTEP_TRANSPORT_ABI,
                                       create,
                                       address,
                                       connect,
                                       nullptr,
                                       broadcast,
                                       all_gather,
                                       nullptr,
                                       exchange,
                                       nullptr,
                                       nullptr,
                                       nullptr,
                                       send,
                                       recv,
                                       abort,
                                       destroy,
                                       announce};

}  // namespace
}  // namespace lockstep::mpi_module

__attribute__((visibility("default"))) const LockstepTransportApi* lockstep_transport_api(void) {
  return &lockstep::mpi_module::kApi;
}
