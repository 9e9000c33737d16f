#pragma once

#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/capture.hpp"
#include "train/cuda/step_graph.hpp"

namespace lockstep::cuda {

/// What a captured step consists of: graphs, and what the host does around and between them.
class StepRecording {
 public:
  /// Does the step once, on the thread's current stream.
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

/// Records a step from its construction until finish(). Otherwise what was recorded is dropped, and
/// libtorch's state is as before.
class GraphCapture final : public Capture {
 public:
  GraphCapture(c10::cuda::CUDAStream stream, at::cuda::MempoolId_t pool);
  ~GraphCapture() override;

  StepRecording finish();

  /// Ends a capture that has failed.
  void drop() noexcept;

  /// Whether an operation has made the recording unusable.
  bool is_spoilt() const { return graph_ && graph_->is_spoilt(); }

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
  std::mutex mutex_;                  // between_graphs comes from autograd's threads too
  std::unique_ptr<StepGraph> graph_;  // that is recorded now; null: the capture has ended
  StepRecording recording_;
  std::vector<std::function<void()>> undo_;
  std::optional<Capture::Current> current_;
};

}  // namespace lockstep::cuda
