#include "comm/gpu/ipc_share.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// Which process this is: in containers of one host a pid alone may name several.
struct ProcessName {
  int64_t pid = 0;
  uint64_t salt = 0;
  bool operator==(const ProcessName&) const = default;
};

ProcessName own_process() {
  static const uint64_t salt = [] {
    std::random_device random;
    return (static_cast<uint64_t>(random()) << 32) | random();
  }();
  return {::getpid(), salt};
}

// The shares of this process, for its other ranks: a handle may be opened after its owner has gone.
class OwnShares {
 public:
  int64_t add(const std::shared_ptr<IpcShare>& share) {
    const std::lock_guard lock(mutex_);
    shares_[++last_] = share;
    return last_;
  }
  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    shares_.erase(number);
  }
  std::shared_ptr<IpcShare> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = shares_.find(number);
    return found == shares_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::map<int64_t, std::weak_ptr<IpcShare>> shares_;
};

OwnShares& own_shares() {
  static OwnShares shares;
  return shares;
}

struct HandleHead {
  ProcessName process;
  int64_t number = 0;  // for those of its process
  int64_t bytes = 0;
  cudaIpcMemHandle_t memory = {};
};

}  // namespace

std::shared_ptr<IpcShare> IpcShare::make(int64_t bytes, int events) {
  auto share = std::make_shared<IpcShare>();
  share->own_memory_ = std::make_unique<GpuMemory>(bytes);
  share->memory_ = share->own_memory_->data();
  share->bytes_ = bytes;
  share->events_.reserve(static_cast<size_t>(events));
  for (int i = 0; i < events; ++i) share->events_.emplace_back(GpuEvent::Reach::kShared);
  share->number_ = own_shares().add(share);
  return share;
}

size_t IpcShare::handle_bytes(int events) {
  return sizeof(HandleHead) + static_cast<size_t>(events) * sizeof(cudaIpcEventHandle_t);
}

std::vector<std::byte> IpcShare::handle() const {
  HandleHead head;
  head.process = own_process();
  head.number = number_;
  head.bytes = bytes_;
  if (bytes_ > 0) check_cuda(cudaIpcGetMemHandle(&head.memory, memory_), "cudaIpcGetMemHandle");
  std::vector<std::byte> handle(handle_bytes(static_cast<int>(events_.size())));
  std::memcpy(handle.data(), &head, sizeof head);
  std::byte* to = handle.data() + sizeof head;
  for (const GpuEvent& event : events_) {
    cudaIpcEventHandle_t event_handle;
    check_cuda(cudaIpcGetEventHandle(&event_handle, event.get()), "cudaIpcGetEventHandle");
    std::memcpy(to, &event_handle, sizeof event_handle);
    to += sizeof event_handle;
  }
  return handle;
}

std::shared_ptr<IpcShare> IpcShare::open(std::span<const std::byte> handle, int events) {
  HandleHead head;
  if (handle.size() != handle_bytes(events))
    throw Error(Code::kInternal, "a handle of another size");
  std::memcpy(&head, handle.data(), sizeof head);
  if (head.process == own_process()) {
    auto share = own_shares().find(head.number);
    if (share) return share;
    throw RankError(Code::kRankFailed, -1, "a rank left before its memory on the GPU was used",
                    "look for the first rank that failed: this one is its victim");
  }
  auto share = std::make_shared<IpcShare>();
  share->owner_ = static_cast<pid_t>(head.process.pid);
  share->bytes_ = head.bytes;
  if (head.bytes > 0) {
    void* memory = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&memory, head.memory, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
    share->memory_ = static_cast<std::byte*>(memory);
  }
  share->events_.reserve(static_cast<size_t>(events));
  const std::byte* from = handle.data() + sizeof head;
  for (int i = 0; i < events; ++i, from += sizeof(cudaIpcEventHandle_t)) {
    cudaIpcEventHandle_t event_handle;
    std::memcpy(&event_handle, from, sizeof event_handle);
    CudaEvent event = nullptr;
    check_cuda(cudaIpcOpenEventHandle(&event, event_handle), "cudaIpcOpenEventHandle");
    share->events_.emplace_back(event);
  }
  return share;
}

IpcShare::~IpcShare() {
  if (number_ > 0) own_shares().remove(number_);
  if (opened() && memory_ != nullptr) (void)cudaIpcCloseMemHandle(memory_);
}

}  // namespace lockstep
