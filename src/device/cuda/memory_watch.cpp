#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "device/cuda/support.hpp"

namespace lockstep::cuda {

using c10::cuda::CUDACachingAllocator::TraceEntry;
using StreamKey = std::pair<int, void*>;  // GPU, raw stream

// Guarded by MemoryWatch's mutex.
struct GraphMemory::State {
  StreamKey stream;
  MemoryAccount* account = nullptr;  // null if nobody watches the stream
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;  // maximum of live_bytes: what the account is charged with
};

namespace {

StreamKey key_of(c10::Stream stream) {
  return {stream.device_index(), c10::cuda::CUDAStream(stream).stream()};
}

// Follows libtorch's CUDA allocator and charges each block to the account of the stream it was
// allocated for. Backward runs on the streams of forward, so it is charged correctly too.
class MemoryWatch {
 public:
  static MemoryWatch& instance() {
    static auto* watch = new MemoryWatch();
    return *watch;
  }

  void watch(c10::Stream stream, MemoryAccount& account) {
    const std::lock_guard lock(mutex_);
    accounts_[key_of(stream)].push_back(&account);
  }

  // Blocks that are still live stay charged: accounts outlive devices. Ends one watch if the
  // account has several of this stream.
  void unwatch(c10::Stream stream, MemoryAccount& account) {
    const std::lock_guard lock(mutex_);
    auto& watching = accounts_[key_of(stream)];
    const auto latest = std::find(watching.rbegin(), watching.rend(), &account);
    if (latest != watching.rend()) watching.erase(std::next(latest).base());
  }

  MemoryAccount* account_of(c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    return account_of(key_of(stream));
  }

  std::unique_ptr<GraphMemory::State> make_graphs(c10::Stream stream) {
    const std::lock_guard lock(mutex_);
    return std::make_unique<GraphMemory::State>(
        GraphMemory::State{.stream = key_of(stream), .account = account_of(key_of(stream))});
  }

  void record(GraphMemory::State& graphs) {
    const std::lock_guard lock(mutex_);
    recording_[graphs.stream] = &graphs;
  }

  void end_recording(const GraphMemory::State& graphs) {
    const std::lock_guard lock(mutex_);
    recording_.erase(graphs.stream);
  }

  // The graphs are gone. Blocks whose tensors still live become ordinary ones.
  void retire(const GraphMemory::State& graphs) {
    const std::lock_guard lock(mutex_);
    for (auto& [address, block] : blocks_) {
      if (block.graphs == &graphs) block.graphs = nullptr;
    }
    if (graphs.account != nullptr) graphs.account->release(graphs.peak_bytes - graphs.live_bytes);
  }

  int64_t held_bytes(const GraphMemory::State& graphs) {
    const std::lock_guard lock(mutex_);
    return graphs.peak_bytes - graphs.live_bytes;
  }

  GraphMemory::Blocks live_blocks(const GraphMemory::State& graphs) {
    const std::lock_guard lock(mutex_);
    GraphMemory::Blocks live;
    for (const auto& [address, block] : blocks_) {
      if (block.graphs == &graphs) live.emplace_back(reinterpret_cast<void*>(address), block.bytes);
    }
    return live;
  }

 private:
  struct Block {
    MemoryAccount* account;  // null if only its graphs need it
    int64_t bytes;
    GraphMemory::State* graphs;  // that it was recorded for, or null
  };

  MemoryWatch() {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
        [this](const TraceEntry& entry) { on_entry(entry); });
  }

  MemoryAccount* account_of(const StreamKey& stream) const {
    const auto found = accounts_.find(stream);
    return found == accounts_.end() || found->second.empty() ? nullptr : found->second.back();
  }

  // The allocator calls this while it holds its own lock, so it must not make CUDA calls.
  void on_entry(const TraceEntry& entry) {
    const std::lock_guard lock(mutex_);
    if (entry.action_ == TraceEntry::ALLOC) {
      allocated({entry.device_, entry.stream_}, entry.addr_, static_cast<int64_t>(entry.size_));
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
      const auto found = blocks_.find(entry.addr_);
      if (found == blocks_.end()) return;
      freed(found->second);
      blocks_.erase(found);
    }
  }

  void allocated(const StreamKey& stream, size_t address, int64_t bytes) {
    const auto recording = recording_.find(stream);
    if (recording != recording_.end()) {
      GraphMemory::State& graphs = *recording->second;
      graphs.live_bytes += bytes;
      const int64_t more = graphs.live_bytes - graphs.peak_bytes;
      if (more > 0) {
        graphs.peak_bytes += more;
        if (graphs.account != nullptr) graphs.account->charge(more);
      }
      blocks_[address] = {graphs.account, bytes, &graphs};
      return;
    }
    MemoryAccount* account = account_of(stream);
    if (account == nullptr) return;
    account->charge(bytes);
    blocks_[address] = {account, bytes, nullptr};
  }

  static void freed(const Block& block) {
    if (block.graphs != nullptr) {
      block.graphs->live_bytes -= block.bytes;
    } else if (block.account != nullptr) {
      block.account->release(block.bytes);
    }
  }

  std::mutex mutex_;
  std::map<StreamKey, std::vector<MemoryAccount*>> accounts_;
  std::map<StreamKey, GraphMemory::State*> recording_;
  std::unordered_map<size_t, Block> blocks_;  // [address]
};

}  // namespace

void watch_memory(c10::Stream stream, MemoryAccount& account) {
  MemoryWatch::instance().watch(stream, account);
}

void unwatch_memory(c10::Stream stream, MemoryAccount& account) {
  MemoryWatch::instance().unwatch(stream, account);
}

MemoryAccount* watching_account(c10::Stream stream) {
  return MemoryWatch::instance().account_of(stream);
}

GraphMemory::GraphMemory(c10::Stream stream)
    : state_(MemoryWatch::instance().make_graphs(stream)) {}

GraphMemory::~GraphMemory() {
  MemoryWatch::instance().retire(*state_);
}

GraphMemory::Recording::Recording(GraphMemory& memory) : memory_(memory) {
  MemoryWatch::instance().record(*memory_.state_);
}

GraphMemory::Recording::~Recording() {
  MemoryWatch::instance().end_recording(*memory_.state_);
}

int64_t GraphMemory::held_bytes() const {
  return MemoryWatch::instance().held_bytes(*state_);
}

GraphMemory::Blocks GraphMemory::live_blocks() const {
  return MemoryWatch::instance().live_blocks(*state_);
}

}  // namespace lockstep::cuda
