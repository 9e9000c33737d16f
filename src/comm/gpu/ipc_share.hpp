#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "comm/gpu/gpu_runtime.hpp"

namespace lockstep {

/// Memory and events of one rank that its peers use too. Its owner gives them a handle, plain
/// bytes; whoever opens the handle reaches the same things. In the owner's own process it then
/// shares their ownership (CUDA opens nothing twice there); in another one they end with the
/// owner's, so owners keep them until all have stopped using them.
class IpcShare {
 public:
  /// Makes memory (zeroed; none for 0 bytes) and events on the current GPU.
  static std::shared_ptr<IpcShare> make(int64_t bytes, int events);

  static size_t handle_bytes(int events);
  std::vector<std::byte> handle() const;

  /// For the current GPU. kRankFailed if the owner is of this process and has let it go.
  static std::shared_ptr<IpcShare> open(std::span<const std::byte> handle, int events);

  IpcShare() = default;
  ~IpcShare();
  IpcShare(const IpcShare&) = delete;
  IpcShare& operator=(const IpcShare&) = delete;

  std::byte* memory() const { return memory_; }
  int64_t bytes() const { return bytes_; }
  const GpuEvent& event(int index) const { return events_.at(static_cast<size_t>(index)); }
  std::span<const GpuEvent> events() const { return events_; }
  bool opened() const { return owner_ != 0; }  ///< from another process
  pid_t owner() const { return owner_; }       ///< that process; 0 if it is this one

 private:
  std::unique_ptr<GpuMemory> own_memory_;  // null if opened
  std::byte* memory_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<GpuEvent> events_;
  pid_t owner_ = 0;
  int64_t number_ = 0;  // by which this process finds it
};

}  // namespace lockstep
