#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/cuda_stream.hpp"

struct CUevent_st;

// CUDA's objects with an owner each. No CUDA header is needed to include this.

namespace lockstep {

using CudaEvent = CUevent_st*;

/// Turns a cudaError_t that is not success into an Error: kOutOfMemory, or kBackend with the name
/// of the call.
void check_cuda(int status, std::string_view call);

/// Makes a GPU the current one of this thread, and the one before it at the end.
class GpuGuard {
 public:
  explicit GpuGuard(int gpu);
  ~GpuGuard();
  GpuGuard(const GpuGuard&) = delete;
  GpuGuard& operator=(const GpuGuard&) = delete;

 private:
  int before_ = 0;
  int gpu_;
};

/// Zeroed memory of the current GPU, in whole blocks of 2 MiB: CUDA shares no less with other
/// processes. Null if bytes is 0.
class GpuMemory {
 public:
  explicit GpuMemory(int64_t bytes);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
};

/// Memory of the host that GPUs copy from and to by themselves.
class PinnedMemory {
 public:
  explicit PinnedMemory(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

/// An event without timing; `kShared` ones can be opened by other processes.
class GpuEvent {
 public:
  enum class Reach { kLocal, kShared };
  explicit GpuEvent(Reach reach = Reach::kLocal);
  /// Takes over one that was opened.
  explicit GpuEvent(CudaEvent opened) : event_(opened) {}
  ~GpuEvent();
  GpuEvent(GpuEvent&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  GpuEvent& operator=(GpuEvent&&) = delete;

  CudaEvent get() const { return event_; }
  void record(CudaStream stream) const;
  /// What is queued on `stream` from now on waits for the latest record.
  void hold(CudaStream stream) const;
  bool reached() const;  ///< the latest record

 private:
  CudaEvent event_ = nullptr;
};

/// A stream of the current GPU that waits for no other, served before others if the GPU is busy.
class GpuStream {
 public:
  GpuStream();
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  CudaStream get() const { return stream_; }
  bool idle() const;

  /// Never destroys it: for a stream that waits for an event which will not come.
  void leave_behind() { stream_ = nullptr; }

 private:
  CudaStream stream_ = nullptr;
};

/// Copies within and between GPUs and pinned memory, in the order of the stream; nothing if both
/// are the same.
void gpu_copy(void* to, const void* from, int64_t bytes, CudaStream stream);

/// Whether what is queued on the stream goes into a graph.
bool is_captured(CudaStream stream);

/// kCapture if the stream is being captured into a graph: `what` needs the host at every call.
void check_not_captured(CudaStream stream, std::string_view what);

}  // namespace lockstep
