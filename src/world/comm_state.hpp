#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <chrono>
#include <initializer_list>
#include <memory>
#include <optional>

#include "comm/backend.hpp"
#include "device/streams.hpp"
#include "lockstep/communicator.hpp"

namespace lockstep {

/// Default timeout of every wait for another rank.
inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

/// A communicator's own stream, in whose order calls happen that were begun and not yet waited for:
/// what the backend queues there holds no other stream back, so that a backward computes on while
/// its buckets are in flight.
class SideStream {
 public:
  explicit SideStream(int gpu)
      : own_(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu))) {}

  c10::Stream stream() const { return own_.get(); }

  /// What is queued here from now on starts after what the thread's current stream holds.
  void follow_current() const;

  /// What the thread's current stream is given from now on starts after what is queued here.
  void hold_back_current() const;

 private:
  const OwnStream own_;
};

/// What the copies of one Communicator share.
struct CommState {
  CommState(std::unique_ptr<Backend> on_host, std::chrono::milliseconds limit)
      : CommState(std::move(on_host), nullptr, -1, limit) {}
  CommState(std::unique_ptr<Backend> on_host, std::unique_ptr<Backend> on_gpu, int number_of_gpu,
            std::chrono::milliseconds limit);
  ~CommState();
  CommState(const CommState&) = delete;
  CommState& operator=(const CommState&) = delete;

  int rank() const { return host->rank(); }
  int size() const { return host->size(); }

  /// Whether this communicator moves the memory of that device itself.
  bool reaches(torch::Device device) const {
    return gpu != nullptr && device.is_cuda() && device.index() == gpu_index;
  }

  /// For a call to `backend`: on a GPU in the order of the thread's current stream.
  CallContext context(const Backend& backend, const CallOptions& options) const;

  std::unique_ptr<Backend> host;
  std::unique_ptr<Backend> gpu;    // on top of host; null: GPU tensors go through the host's memory
  int gpu_index = -1;              // of this rank, as libtorch counts
  std::optional<SideStream> side;  // of calls on the GPU that were begun, from the first on
  std::chrono::milliseconds timeout;
  std::optional<BoardPage> page;
  CommStats stats;
};

/// How the tensors of one call reach a backend.
struct Route {
  enum class Way {
    kDirect,       ///< the backend works in their memory
    kThroughHost,  ///< the backend works in copies of GPU tensors on the host
    kStay,         ///< a rank alone on a GPU: the backend checks the call, and no value moves
  };
  Backend& backend;
  Way way = Way::kDirect;

  /// A GPU backend serves tensors that are all on its GPU, the host's backend all others.
  static Route of(const CommState& state, std::initializer_list<torch::Tensor> tensors);

  /// A message that a rank sends itself waits on the host until it is received.
  static Route of_message(const CommState& state, const torch::Tensor& tensor);
};

/// A tensor on its way to a backend and back: itself, a copy on the host, or nothing.
class StagedTensor {
 public:
  /// Refuses what no backend can move (kTensorMismatch).
  StagedTensor(const char* operation, const torch::Tensor& tensor, Route::Way way);

  Buffer buffer() const { return {data(), count(), dtype_}; }
  ConstBuffer const_buffer() const { return {data(), count(), dtype_}; }
  int64_t bytes() const;  ///< of the tensor

  /// The memory is in use on the thread's current stream, too, whatever stream it was made for.
  void keep_for_current_stream() const;

  /// After a call that wrote: copies the values of a host copy back.
  void copy_back() const;

  /// After a call in which no value moved: takes them from the call's input.
  void copy_from(const StagedTensor& input) const;

 private:
  void* data() const { return staged_.defined() ? staged_.data_ptr() : nullptr; }
  int64_t count() const { return staged_.defined() ? staged_.numel() : 0; }

  Dtype dtype_;
  torch::Tensor original_;
  torch::Tensor staged_;  // undefined if nothing moves
};

}  // namespace lockstep
