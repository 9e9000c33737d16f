#include "train/cuda/graph_capture.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep::cuda {
namespace {

// Every part of the cleanup is attempted, even if others fail.
template <class Part>
void try_to(Part part) noexcept {
  try {
    part();
  } catch (const std::exception&) {  // was not begun, or has ended already
  }
}

// See Note [Graphs of generators].
std::mutex& generator_lists() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

StepGraph::StepGraph() : graph_(std::make_unique<Graph>()) {}

StepGraph::~StepGraph() {
  if (phase_ == Phase::kRecording) drop();
  const std::lock_guard lock(generator_lists());
  // libtorch's destructor would end the process if adding the graph to a list has failed.
  auto& generators = graph_->captured_generator_states_;
  for (auto it = generators.begin(); it != generators.end();) {
    if (it->first->registered_graphs_.contains(graph_.get())) {
      ++it;
    } else {
      it = generators.erase(it);
    }
  }
  graph_.reset();
}

void StepGraph::begin(at::cuda::MempoolId_t pool) {
  const std::lock_guard lock(generator_lists());
  phase_ = Phase::kRecording;
  graph_->capture_begin(pool, cudaStreamCaptureModeRelaxed);
}

bool StepGraph::is_empty() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(graph_->capture_stream_.stream(), &status, &id, &graph));
  if (status != cudaStreamCaptureStatusActive) return false;
  size_t nodes = 0;
  C10_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
  return nodes == 0;
}

bool StepGraph::is_invalid() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto error = cudaStreamIsCapturing(graph_->capture_stream_.stream(), &status);
  (void)cudaGetLastError();
  return error != cudaSuccess || status != cudaStreamCaptureStatusActive;
}

void StepGraph::end() {
  if (is_invalid()) {
    throw Error(Code::kCapture, "an operation of the step has invalidated its capture",
                "leave out of the step what waits for the GPU, or run it without capture");
  }
  graph_->capture_end();
  phase_ = Phase::kRecorded;
}

void StepGraph::drop() noexcept {
  if (phase_ != Phase::kRecording) return;
  phase_ = Phase::kDropped;
  cudaGraph_t half = nullptr;
  if (cudaStreamEndCapture(graph_->capture_stream_.stream(), &half) == cudaSuccess &&
      half != nullptr) {
    (void)cudaGraphDestroy(half);
  }
  (void)cudaGetLastError();  // an invalid recording reports its error again
  for (auto& [generator, increment] : graph_->captured_generator_states_) {
    generator->capturing_ = false;
  }
  if (graph_->capture_ended_) return;  // it was recorded, and frees its memory itself
  const auto gpu = graph_->capture_dev_;
  const auto pool = graph_->mempool_id_;
  if (gpu == Graph::UNDEFINED_DEVICE) return;  // it failed before it allocated memory
  auto* host_memory = at::getHostAllocator(at::kCUDA);
  try_to([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(gpu, pool); });
  try_to([&] { c10::cuda::CUDACachingAllocator::releasePool(gpu, pool); });
  try_to([&] { host_memory->end_allocate_to_pool(pool); });
  try_to([&] { host_memory->release_pool(pool); });
}

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

// If nothing was recorded since the last cut there is no graph to end.
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
