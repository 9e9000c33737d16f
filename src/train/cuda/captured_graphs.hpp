#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <torch/types.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda/support.hpp"
#include "device/streams.hpp"
#include "lockstep/captured_step.hpp"
#include "lockstep/memory.hpp"
#include "train/cuda/graph_capture.hpp"

namespace lockstep::cuda {

/// A step on one GPU: the function runs directly while it warms up, is then captured, and replayed
/// from then on; separately for each shape of its inputs.
///
/// Note [One stream]: libtorch cannot capture the default stream, which programs use by default. A
/// step of such a program runs on a stream of its own from its first call on, after what the caller
/// has queued and before what the caller queues next. Warm-up must use that stream too: autograd
/// accumulates a gradient on the stream on which its parameter was first used.
class CapturedGraphs {
 public:
  using Function = CapturedStep::Function;
  using Tensors = std::vector<torch::Tensor>;

  CapturedGraphs(torch::Device device, const CaptureOptions& options);
  ~CapturedGraphs();
  CapturedGraphs(const CapturedGraphs&) = delete;
  CapturedGraphs& operator=(const CapturedGraphs&) = delete;

  torch::Device device() const { return stream_.device(); }

  /// Returns the step's result, detached, in a tensor that belongs to the caller.
  torch::Tensor call(const Function& step, const Tensors& inputs);

  /// The inputs of the last call, which must have replayed.
  const Tensors& inputs() const { return shapes_.front().inputs; }
  CaptureStats stats() const;
  const std::string& why_not() const { return why_not_; }  ///< of the last call; "": it replayed

 private:
  struct Signature {
    std::vector<std::vector<int64_t>> sizes;
    std::vector<torch::ScalarType> dtypes;
    std::vector<torch::Device> devices;
    bool operator==(const Signature&) const = default;
  };

  // Inputs of one signature.
  struct Shape {
    Signature signature;
    int64_t calls = 0;  // before it was captured
    Tensors inputs = {};
    torch::Tensor output = {};  // undefined if the step returns nothing
    std::optional<StepRecording> recording = {};
  };

  class OnStream;

  static Signature signature_of(const Tensors& inputs);
  Shape& shape_of(const Tensors& inputs);
  void forget_oldest();
  bool warming_up(const Shape& shape) const;
  torch::Tensor run(const Function& step, const Tensors& inputs, const std::string& why);
  void capture(const Function& step, const Tensors& inputs, Shape& shape);
  void record(const Function& step, Shape& shape);
  void replay(const Tensors& inputs, Shape& shape);
  void require_on_gpu(const Tensors& inputs);
  void give_up(const std::string& why);
  bool any_captured() const;
  void clear_leftovers(const GraphMemory::Blocks& computed) const;

  const CaptureOptions options_;
  std::optional<OwnStream> own_stream_;  // if the step is called on the default stream
  const c10::cuda::CUDAStream stream_;
  MemoryAccount* account_ = nullptr;  // charged for own_stream_; null: none is
  at::cuda::CUDAEvent before_;        // the point the caller's stream had reached
  at::cuda::CUDAEvent after_;         // the point the step's had reached
  at::cuda::MempoolId_t pool_{0, 0};
  std::optional<GraphMemory> memory_;  // of the pool
  std::list<Shape> shapes_;            // last used first; destroyed before their memory
  bool failed_ = false;                // a capture failed: every call runs the function
  std::string why_not_;
  CaptureStats stats_;
};

}  // namespace lockstep::cuda
