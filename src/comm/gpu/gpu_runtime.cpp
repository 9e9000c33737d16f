#include "comm/gpu/gpu_runtime.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr int64_t kBlockBytes = 2 << 20;

bool is_over(cudaError_t status, std::string_view call) {
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // an answer, not an error
    return false;
  }
  check_cuda(status, call);
  return true;
}

}  // namespace

void check_cuda(int status, std::string_view call) {
  if (status == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(status);
  (void)cudaGetLastError();  // reported here: later calls must not report it again
  if (error == cudaErrorMemoryAllocation) {
    throw Error(Code::kOutOfMemory, fmt::format("{}: the GPU has no memory left", call),
                "use a smaller model or batch, or fewer ranks on this GPU");
  }
  throw Error(
      Code::kBackend,
      fmt::format("{} failed: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)),
      "see `lockstep doctor` for the GPU and its driver; an error of a kernel may show up in a "
      "later call");
}

GpuGuard::GpuGuard(int gpu) : gpu_(gpu) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != gpu_) check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
}

GpuGuard::~GpuGuard() {
  if (before_ != gpu_) (void)cudaSetDevice(before_);
}

GpuMemory::GpuMemory(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const int64_t blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
  const auto rounded = static_cast<size_t>(blocks * kBlockBytes);
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, rounded), fmt::format("cudaMalloc of {}", format_bytes(bytes)));
  data_ = static_cast<std::byte*>(memory);
  int status = cudaMemset(memory, 0, rounded);
  // The host waits here: peers may use the memory as soon as they learn of it.
  if (status == cudaSuccess) status = cudaStreamSynchronize(cudaStreamLegacy);
  if (status == cudaSuccess) return;
  (void)cudaFree(memory);
  check_cuda(status, "cudaMemset");
}

GpuMemory::~GpuMemory() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

PinnedMemory::PinnedMemory(int64_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable),
             fmt::format("cudaHostAlloc of {}", format_bytes(bytes)));
  data_ = static_cast<std::byte*>(memory);
}

PinnedMemory::~PinnedMemory() {
  (void)cudaFreeHost(data_);
}

GpuEvent::GpuEvent(Reach reach) {
  const unsigned flags =
      cudaEventDisableTiming | (reach == Reach::kShared ? cudaEventInterprocess : 0U);
  check_cuda(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreateWithFlags");
}

GpuEvent::~GpuEvent() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

void GpuEvent::record(CudaStream stream) const {
  check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
}

void GpuEvent::hold(CudaStream stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

bool GpuEvent::reached() const {
  return is_over(cudaEventQuery(event_), "cudaEventQuery");
}

GpuStream::GpuStream() {
  int lowest = 0;
  int highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
             "cudaDeviceGetStreamPriorityRange");
  check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
             "cudaStreamCreateWithPriority");
}

GpuStream::~GpuStream() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

bool GpuStream::idle() const {
  return is_over(cudaStreamQuery(stream_), "cudaStreamQuery");
}

void gpu_copy(void* to, const void* from, int64_t bytes, CudaStream stream) {
  if (bytes == 0 || to == from) return;
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
             "cudaMemcpyAsync");
}

bool is_captured(CudaStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void check_not_captured(CudaStream stream, std::string_view what) {
  if (!is_captured(stream)) return;
  throw Error(Code::kCapture,
              fmt::format("{} cannot be captured: its ranks agree on the host at every call", what),
              "make the call through lockstep's Communicator, which puts it between the graphs, or "
              "run the step without capture");
}

}  // namespace lockstep
