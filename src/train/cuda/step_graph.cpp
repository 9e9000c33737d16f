#include "train/cuda/step_graph.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <mutex>

#include "lockstep/error.hpp"

namespace lockstep::cuda {
namespace {

// Each part of the way out is tried, whatever became of the others.
template <class Part>
void try_to(Part part) noexcept {
  try {
    part();
  } catch (const std::exception&) {  // was not begun, or has ended already
  }
}

// See Note [Graphs of generators].
std::mutex& listing() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

StepGraph::StepGraph() : graph_(std::make_unique<Graph>()) {}

StepGraph::~StepGraph() {
  if (phase_ == Phase::kRecording) drop();
  const std::lock_guard lock(listing());
  // Where listing itself has failed, libtorch's destructor would end the process.
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
  const std::lock_guard lock(listing());
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

bool StepGraph::is_spoilt() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto error = cudaStreamIsCapturing(graph_->capture_stream_.stream(), &status);
  (void)cudaGetLastError();
  return error != cudaSuccess || status != cudaStreamCaptureStatusActive;
}

void StepGraph::end() {
  if (is_spoilt()) {
    throw Error(Code::kCapture, "an operation of the step has spoilt its capture",
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
  (void)cudaGetLastError();  // a spoilt recording says so once more
  for (auto& [generator, increment] : graph_->captured_generator_states_) {
    generator->capturing_ = false;
  }
  if (graph_->capture_ended_) return;  // it was recorded, and gives its memory back itself
  const auto gpu = graph_->capture_dev_;
  const auto pool = graph_->mempool_id_;
  if (gpu == Graph::UNDEFINED_DEVICE) return;  // it failed before memory was asked for
  auto* host_memory = at::getHostAllocator(at::kCUDA);
  try_to([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(gpu, pool); });
  try_to([&] { c10::cuda::CUDACachingAllocator::releasePool(gpu, pool); });
  try_to([&] { host_memory->end_allocate_to_pool(pool); });
  try_to([&] { host_memory->release_pool(pool); });
}

}  // namespace lockstep::cuda
