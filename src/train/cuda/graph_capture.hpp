#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/capture.hpp"

namespace lockstep::cuda {

/// libtorch's CUDA graph, which has private memory and fresh random numbers, plus a way to end a
/// recording that has failed: libtorch's own would leave its allocator and generators recording.
///
/// Note [Relaxed capture]: a recording may begin in one thread and end in another, because backward
/// runs on autograd's threads, and other threads continue to use CUDA meanwhile. Only the relaxed
/// mode allows both.
///
/// Note [Graphs of generators]: a generator keeps a list of the graphs that draw from it, and
/// libtorch does not lock that list. Graphs are added when a recording begins and removed when they
/// are destroyed, in whatever thread, so we do both under a lock.
class StepGraph {
 public:
  StepGraph();
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// Begins to record what is queued on the thread's current stream. Memory comes from `pool`.
  void begin(at::cuda::MempoolId_t pool);

  /// Whether nothing has been recorded so far.
  bool is_empty() const;

  /// Whether an operation that cannot be recorded has invalidated the recording.
  bool is_invalid() const;

  void end();
  void drop() noexcept;

  /// Queues the recorded work on the thread's current stream.
  void launch() { graph_->replay(); }

 private:
  enum class Phase { kNew, kRecording, kRecorded, kDropped } phase_ = Phase::kNew;

  // Members of libtorch's graph that drop() needs.
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

/// A captured step: graphs, and what the host does around and between them.
class StepRecording {
 public:
  /// Runs the step once, on the thread's current stream.
  void replay() const;

  int64_t graphs() const;

 private:
  friend class GraphCapture;
  using Work = std::function<void()>;

  struct Part {
    std::unique_ptr<StepGraph> graph;  // null: nothing comes before `then`
    std::vector<Work> then;
  };

  std::vector<std::shared_ptr<const void>> kept_;  // outlives the graphs
  std::vector<Work> before_;
  std::vector<Part> parts_;
  std::vector<Work> after_;
};

/// Records a step from its construction until finish(). Without finish() the recording is dropped
/// and libtorch's state is restored.
class GraphCapture final : public Capture {
 public:
  GraphCapture(c10::cuda::CUDAStream stream, at::cuda::MempoolId_t pool);
  ~GraphCapture() override;

  StepRecording finish();

  /// Ends a capture that has failed.
  void drop() noexcept;

  /// Whether an operation has invalidated the recording.
  bool is_invalid() const { return graph_ && graph_->is_invalid(); }

  c10::Stream stream() const override { return stream_.unwrap(); }
  void before_replay(std::function<void()> work) override;
  void after_replay(std::function<void()> work) override;
  void between_graphs(std::function<void()> work) override;
  void if_dropped(std::function<void()> undo) override;
  void keep(std::shared_ptr<const void> what) override;

 private:
  void begin_graph();

  const c10::cuda::CUDAStream stream_;
  const at::cuda::MempoolId_t pool_;
  std::mutex mutex_;                  // between_graphs is also called from autograd's threads
  std::unique_ptr<StepGraph> graph_;  // the one being recorded; null: the capture has ended
  StepRecording recording_;
  std::vector<std::function<void()>> undo_;
  std::optional<Capture::Current> current_;
};

}  // namespace lockstep::cuda
