#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>

namespace lockstep::cuda {

/// libtorch's CUDA graph, which brings private memory and fresh random numbers, with a way out of a
/// recording that has failed: libtorch's own would leave its allocator and generators recording.
///
/// Note [Relaxed capture]: a recording may begin in one thread and end in another, because backward
/// runs on autograd's; and other threads go on using CUDA meanwhile. Only the relaxed mode allows
/// both.
///
/// Note [Graphs of generators]: a generator lists the graphs that draw from it, and libtorch guards
/// that list by nothing. Graphs are listed when a recording begins and taken off when they are
/// destroyed, in whatever thread, so both happen under a lock here.
class StepGraph {
 public:
  StepGraph();
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// Records what is queued on the thread's current stream from now on. Memory comes from `pool`.
  void begin(at::cuda::MempoolId_t pool);

  /// Whether nothing was recorded so far.
  bool is_empty() const;

  /// Whether an operation that cannot be recorded has spoilt the recording.
  bool is_spoilt() const;

  void end();
  void drop() noexcept;

  /// Queues all of it on the thread's current stream.
  void launch() { graph_->replay(); }

 private:
  enum class Phase { kNew, kRecording, kRecorded, kDropped } phase_ = Phase::kNew;

  // What the way out needs of libtorch's.
  struct Graph : at::cuda::CUDAGraph {
    using CUDAGraph::capture_dev_;
    using CUDAGraph::capture_ended_;
    using CUDAGraph::capture_stream_;
    using CUDAGraph::captured_generator_states_;
    using CUDAGraph::mempool_id_;
    using CUDAGraph::UNDEFINED_DEVICE;
  };
  std::unique_ptr<Graph> graph_;
};

}  // namespace lockstep::cuda
