#pragma once

#include <cstdint>
#include <functional>

#include "comm/gpu/gpu_runtime.hpp"

namespace lockstep {

/// How far a stream has come through NCCL's calls. The stream itself writes it to words in the
/// host's memory, so that nobody asks CUDA, which a thread that waits inside it for the same stream
/// (a copy to pageable memory does) keeps all others out of.
class NcclProgress {
 public:
  explicit NcclProgress(CudaStream stream);

  /// Queues a call between its two marks, and gives its number.
  uint32_t queue(const std::function<void()>& call);

  bool has_begun(uint32_t number) const { return has_reached(0, number); }
  bool has_ended(uint32_t number) const { return has_reached(1, number); }

 private:
  void mark(int word, uint32_t number) const;
  bool has_reached(int word, uint32_t number) const;

  CudaStream stream_;
  PinnedMemory words_;  // the latest call that has begun, and that has ended
  uint32_t number_ = 0;
};

}  // namespace lockstep
