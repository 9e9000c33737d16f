#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep::cuda {

/// The memory of CUDA graphs that share a pool. What is allocated for the stream while they are
/// recorded stays charged as long as this lives, also after its tensor is gone: every replay uses
/// it again.
class GraphMemory {
 public:
  explicit GraphMemory(c10::Stream stream);
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  /// Guard: a recording goes on.
  class Recording {
   public:
    explicit Recording(GraphMemory& memory);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    GraphMemory& memory_;
  };

  /// Beyond what tensors that still live hold.
  int64_t held_bytes() const;

  using Blocks = std::vector<std::pair<void*, int64_t>>;  ///< address, bytes
  /// Those from recordings whose tensors still live.
  Blocks live_blocks() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::cuda
