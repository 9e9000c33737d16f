#include "train/cuda/graph_capture.hpp"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

namespace lockstep::cuda {

void StepRecording::replay() const {
  for (const auto& work : before_) work();
  for (const auto& part : parts_) {
    if (part.graph) part.graph->launch();
    for (const auto& work : part.then) work();
  }
  for (const auto& work : after_) work();
}

int64_t StepRecording::graphs() const {
  return std::count_if(parts_.begin(), parts_.end(),
                       [](const Part& part) { return part.graph != nullptr; });
}

GraphCapture::GraphCapture(c10::cuda::CUDAStream stream, at::cuda::MempoolId_t pool)
    : stream_(stream), pool_(pool) {
  begin_graph();
  current_.emplace(*this);
}

GraphCapture::~GraphCapture() {
  drop();
}

void GraphCapture::begin_graph() {
  graph_ = std::make_unique<StepGraph>();
  graph_->begin(pool_);
}

StepRecording GraphCapture::finish() {
  const c10::cuda::CUDAStreamGuard on(stream_);
  if (graph_->is_empty()) {
    graph_->drop();
  } else {
    graph_->end();
    recording_.parts_.push_back({std::move(graph_), {}});
  }
  graph_.reset();
  current_.reset();
  return std::move(recording_);
}

void GraphCapture::drop() noexcept {
  current_.reset();
  if (!graph_) return;
  graph_->drop();
  graph_.reset();
  std::for_each(undo_.rbegin(), undo_.rend(), [](const auto& undo) { undo(); });
  recording_ = {};
}

void GraphCapture::before_replay(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  recording_.before_.push_back(std::move(work));
}

void GraphCapture::after_replay(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  recording_.after_.push_back(std::move(work));
}

// Where nothing was recorded since the last cut there is no graph to end.
void GraphCapture::between_graphs(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  const c10::cuda::CUDAStreamGuard on(stream_);
  auto& parts = recording_.parts_;
  if (!graph_->is_empty()) {
    graph_->end();
    parts.push_back({std::move(graph_), {}});
    begin_graph();
  } else if (parts.empty()) {
    parts.emplace_back();
  }
  parts.back().then.push_back(std::move(work));
}

void GraphCapture::if_dropped(std::function<void()> undo) {
  const std::lock_guard lock(mutex_);
  undo_.push_back(std::move(undo));
}

void GraphCapture::keep(std::shared_ptr<const void> what) {
  const std::lock_guard lock(mutex_);
  recording_.kept_.push_back(std::move(what));
}

}  // namespace lockstep::cuda
